"""A few of the small stateful programs on workers, where steps run ahead of Python, and values are placed and freed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given

from monarch.distributed import Mesh
from tests.language.programs.stateful import BODIES, CHANGES, GIVEN, compare
from tests.sample import examples


@pytest.fixture(scope="module")
def workers() -> Iterator[Mesh]:
    with Mesh(data=2) as mesh:
        yield mesh


@examples(3, 200)
@given(BODIES, CHANGES, GIVEN)
def test_a_program_is_the_same_code_without_it(
    workers: Mesh, inside: list[str], outside: list[list[str]], kinds: list[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(inside, outside, kinds, workers)
