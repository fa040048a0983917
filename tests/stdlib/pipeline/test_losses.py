"""Which losses of microbatches add up to that of their batch, and that others are computed on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh

Loss = Callable[..., torch.Tensor]
CLASSES = 5


def masked(counts: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = counts(target).to(output.dtype)
        return (F.cross_entropy(output, target.clamp(min=0), reduction="none") * weight).sum() / weight.sum()

    return loss_fn


def confident(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counts = (output.detach().abs().sum(1) > 1).to(output.dtype)
    return ((output - 1).square().sum(1) * counts).sum() / counts.sum().clamp(min=1)


TABLE = torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0])
OF_THE_BATCH = {
    "not -100": masked(lambda y: y != -100),
    "no padding, which is 3": masked(lambda y: y != 3),
    "weights of classes": masked(lambda y: TABLE[y.clamp(min=0)]),
    "what the output says": confident,
}
"""Means over what counts in the batch: on numbers that are tried out they can look like means over its rows."""
BY_ROWS: dict[str, Loss] = {
    "classes": F.cross_entropy,
    "squares": lambda o, y: F.mse_loss(o, F.one_hot(y.clamp(min=0), CLASSES).to(o.dtype)),
    "two terms, and a number": lambda o, y: F.cross_entropy(o, y) - 0.1 * o.logsumexp(-1).square().mean() + 1,
    "stacked": lambda o, y: torch.stack([o.square().mean(), o.abs().mean()]).sum(),
    "margins": lambda o, y: F.multi_margin_loss(o, y.clamp(min=0)),
    "viewed": lambda o, y: F.cross_entropy(o, y.view(-1)),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    y = torch.randint(0, CLASSES, (rows,))
    y[[0, 1, 4, 5]] = -100
    return torch.randn(rows, 6, dtype=torch.float64), y


def stepped(mesh: Mesh, loss_fn: Loss, **options: Any) -> Any:
    made = model()
    pipe = pipeline(made, mesh, microbatches=4, split_at=["2"], layouts={}, **options)

    @monarch.program
    def step(x: Any, y: Any) -> Any:
        return pipe.step(x, target=y, loss_fn=loss_fn)

    return made, step


@pytest.mark.parametrize("mixes_rows", [False, True])
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_mean_over_what_counts_is_that_of_the_batch(name: str, mixes_rows: bool) -> None:
    x, y = batch(9)
    if "3" in name:
        y[y == -100] = 3
    dense = copy.deepcopy(model())
    wanted = OF_THE_BATCH[name](dense(x), y)
    wanted.backward()
    with partitioned_mesh(pipe=2) as mesh:
        made, step = stepped(mesh, OF_THE_BATCH[name], mixes_rows=mixes_rows)
        torch.testing.assert_close(step(x, y).full_tensor(), wanted.detach())
        for ours, theirs in zip(made.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize(("name", "waits"), [*((name, False) for name in BY_ROWS), ("not -100", True)])
def test_only_a_loss_that_is_no_sum_over_rows_makes_microbatches_wait(name: str, waits: bool) -> None:
    _, step = stepped(Mesh.abstract(pipe=2), {**BY_ROWS, **OF_THE_BATCH}[name])
    assert step.compile(*batch(8)).costs["schedule"].get("barriers", []) == ([[1, "loss_fn"]] if waits else [])
