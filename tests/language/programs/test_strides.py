"""Tensors that are not contiguous: a program sees their strides, and gives the results PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.language import Mesh, distribute, program

ARGUMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second column": lambda x: x[:, ::2],
    "expanded": lambda x: x[0].expand(4, 4),
    "channels last": lambda x: x.view(1, 2, 2, 4).to(memory_format=torch.channels_last),
}


def _asked(x: torch.Tensor) -> Any:
    """What code that goes by strides does with a tensor."""
    y = x.clone()
    flat = y.reshape(-1)
    flat.add_(1)  # which `y` shows where it is contiguous
    try:
        viewed = x.view(-1)
    except RuntimeError:
        viewed = None
    kept = x.contiguous()
    kept = kept * 2 if kept is x else kept * 3
    return x.stride(), x.is_contiguous(), y, flat, viewed, kept, torch.empty_like(x).stride(), x * 2


def _plain(found: Any) -> list[Any]:
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in found]


@pytest.mark.parametrize("placed", [False, True])
def test_a_program_sees_the_strides_of_its_arguments(placed: bool, mesh: Mesh, traces: list[str]) -> None:
    step = program(_asked, mesh=mesh)
    x = torch.arange(16.0).view(4, 4)
    for count, make in enumerate(ARGUMENTS.values(), start=1):
        for _ in range(2):
            argument = make(distribute(x, mesh) if placed else x)
            expected = _asked(make(x))
            found = step(argument)
            assert _plain(found) == _plain(expected)
            assert found[-1].stride() == expected[-1].stride()
        assert len(traces) == count


def test_a_result_has_the_strides_that_it_has_in_pytorch(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        return (x * 2).t(), (x * 3)[:, 1], (x * 4).t()[1:]

    x = torch.arange(16.0).view(4, 4)
    for found, expected in zip(step(x), step.__wrapped__(x), strict=True):
        assert found.stride() == expected.stride()
        flat, plain = found.reshape(-1), expected.reshape(-1)
        flat.add_(1)  # a copy, or a view
        plain.add_(1)
        assert (found.tolist(), flat.tolist()) == (expected.tolist(), plain.tolist())


def test_programs_that_differ_in_strides_alone_give_results_of_their_own(mesh: Mesh) -> None:
    step = program(lambda x: x * 2, mesh=mesh)
    x = torch.arange(16.0).view(4, 4)
    for argument in (x, x.t(), x):
        found = step(argument)
        assert (found.stride(), found.tolist()) == (argument.stride(), (argument * 2).tolist())


def test_a_placed_tensor_has_the_strides_of_the_plain_one(mesh: Mesh) -> None:
    x = torch.arange(16.0).view(4, 4).t()
    placed = distribute(x, mesh)
    assert placed.stride() == (1, 4)
    assert placed.as_strided((3,), (1,), 4).tolist() == x.as_strided((3,), (1,), 4).tolist() == [4, 5, 6]
    placed.as_strided((3,), (1,), 4).zero_()
    assert placed[:, 1].tolist() == [0, 0, 0, 7]
