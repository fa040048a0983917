"""PyTorch's default dtype, set between ops: each gives what it gives under that of its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch.language import Mesh, distribute, program

SINGLE, DOUBLE = torch.float32, torch.float64
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of one": lambda x: x.sqrt(),
    "of two": lambda x: x / (x + 1),
    "of a number": lambda x: 0.3 - x * 0.1,
    "of a truth value": lambda x: (x > 1) * 0.3,
    "a choice": lambda x: torch.where(x > 1, x, 0.1),
    "complex": lambda x: x * 0.1j,
    "a reduction": lambda x: x.logsumexp(0),
    "from nothing": lambda x: torch.linspace(0, 1, 4) * x + torch.arange(0, 2, 0.5),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def check(found: Any, expected: torch.Tensor) -> None:
    found = found.full_tensor()
    assert found.dtype == expected.dtype
    rtol = 1e-14 if expected.dtype in (DOUBLE, torch.complex128) else 1e-6
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtypes", [(SINGLE, DOUBLE), (DOUBLE, SINGLE)], ids=["to f64", "to f32"])
@pytest.mark.parametrize("name", OPS)
def test_an_op_follows_the_default_dtype_of_its_line(name: str, dtypes: Any, mesh: Mesh) -> None:
    first, second = dtypes

    def run(x: torch.Tensor) -> Any:
        torch.set_default_dtype(first)
        one = OPS[name](x)
        torch.set_default_dtype(second)
        return one, OPS[name](x)

    whole = torch.arange(4)
    placed, expected = distribute(whole, mesh), run(whole)
    torch.set_default_dtype(first)
    for step in (run, program(run, mesh=mesh)):  # as recorded outside of programs, which runs at the end, and in one
        for _ in range(2):
            for ours, theirs in zip(step(placed), expected, strict=True):
                check(ours, theirs)
            torch.set_default_dtype(first)


def test_a_default_dtype_that_a_program_leaves_is_there_after_each_call(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(DOUBLE)
        return x / 3

    for _ in range(3):
        torch.set_default_dtype(SINGLE)
        found = step(torch.arange(4))
        assert torch.get_default_dtype() is DOUBLE
        check(found, torch.arange(4) / 3)
