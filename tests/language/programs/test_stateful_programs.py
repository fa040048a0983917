"""Small programs that read and write Python in every way, with changes from outside between their calls: results and
all that can be reached are those of the same code without `@program`."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, seed

from monarch.compiler.execution.factories import executors_by
from monarch.language import Mesh
from monarch.language.compile import compiling_with
from tests.language.dense import DenseExecutor, plan_of
from tests.language.programs.stateful import BODIES, CHANGES, GIVEN, compare
from tests.sample import examples


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """A trace may have the garbage collector look at all there is: it leaves alone what was there before."""
    tried(["net(y).sum().backward()"], [[]], ["plain"])  # loads what tracing needs
    gc.collect()
    gc.freeze()
    yield
    os.environ.pop("MONARCH_STATEFUL", None)


def tried(inside: list[str], outside: list[list[str]], kinds: Sequence[str]) -> None:
    with (
        warnings.catch_warnings(),
        executors_by(DenseExecutor),
        compiling_with(plan_of),
        Mesh(data=2) as mesh,
    ):
        warnings.simplefilter("ignore")
        compare(inside, outside, kinds, mesh)


EXAMPLES = [
    (["s.a = s.a * 0.5 + x", "s.b.mul_(0.5)"], [[], [], ["s.b = s.a"], [], []]),
    (["y = y + getattr(S, 'late', 0.0)", "S.late = s.f"], [[], [], []]),
    (["s.t.append(y.detach())", "y = y + s.t[-1] if s.t else y"], [[], [], ["s.t = []"], [], ["s.fail = True"], []]),
    (["hook.remove()"], [["s.fail = True"], []]),
    (["y = y + 1 if s.a is s.b else y", "s.a = s.b = s.a * 0.5 + x"], [[], [], ["s.b = s.a.clone()"], [], []]),
]


@pytest.mark.parametrize("inside, outside", EXAMPLES)
def test_programs_that_were_once_another(frozen: None, inside: list[str], outside: list[list[str]]) -> None:
    tried(inside, outside, ["plain"])


@pytest.mark.parametrize("part", range(4))
def test_a_program_is_the_same_code_without_it(frozen: None, part: int) -> None:
    seed(part)(examples(20, 5_000)(given(BODIES, CHANGES, GIVEN)(tried)))()
