"""Random indices (slices, numbers, lists, masks, tensors, None, `...`), read and written, in random layouts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import monarch
from tests.language.partitioned import partitioned_mesh

PLACE = object()
"""Stands for a tensor without dims that the program is given."""


def entry(draw: random.Random, size: int, together: tuple[int, ...]) -> Any:
    """An entry of an index into a dim of this size; tensors, lists and masks broadcast `together`."""
    several = together[-1]
    kind = draw.choice(["slice", "number", "tensor", "list", "mask", "place"])
    if kind == "slice":
        return slice(draw.choice([None, 0, 1, -size]), draw.choice([None, -1, size + 3]), draw.choice([None, 1, 2]))
    if kind == "tensor":
        return torch.randint(-size, size, draw.choice([together, together[-1:]]))
    if kind == "list":
        return [draw.randrange(-size, size) for _ in range(several)]
    if kind == "mask" and several <= size:
        mask = torch.zeros(size, dtype=torch.bool)
        mask[draw.sample(range(size), several)] = True
        return mask
    return PLACE if kind == "place" else draw.randrange(-size, size)


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore:.*runs whole on every worker")
@pytest.mark.parametrize("seed", range(60))
def test_a_random_index_reads_and_writes_as_in_pytorch(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    x = torch.randn([draw.randint(2, 6) for _ in range(draw.randint(1, 4))])
    together = draw.choice([(1,), (2,), (3, 2)])
    entries = [entry(draw, size, together) for size in x.shape[: draw.randint(1, x.ndim)]]
    entries.insert(draw.randint(0, len(entries)), draw.choice([None, ...]) if len(entries) == x.ndim else None)
    place = torch.tensor(draw.randrange(-min(x.shape), min(x.shape)))

    def used(x: torch.Tensor, place: torch.Tensor) -> list[torch.Tensor]:
        index = tuple(place if each is PLACE else each for each in entries)
        x = x.detach().requires_grad_()
        read, written = x[index], x.clone()
        written[index] = read.detach().cos()
        written[index] += 1
        loss = (written * read.sum()).square().sum() + read.sin().sum()
        return [read.detach(), written.detach(), *torch.autograd.grad(loss, x)]

    layout = ["-"] * x.ndim
    for name in ("data", "model"):
        at = draw.randrange(x.ndim)
        layout[at] = f"@{name}" if layout[at] == "-" else layout[at]
    expected: Any
    try:
        expected = used(x, place)
    except IndexError:  # index tensors that do not broadcast: PyTorch's error
        expected = None
    with partitioned_mesh(seed % 2 == 0, data=2, model=draw.choice([2, 3])) as mesh:
        program = monarch.program(used, mesh=mesh)
        placed = monarch.distribute(x, mesh, f"[{', '.join(layout)}]")
        if expected is None:
            with pytest.raises(IndexError):
                program(placed, place)
            return
        for ours, theirs in zip(program(placed, place), expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-4)
