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
from monarch.exceptions import ProgramError
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


# -- losses that read what the model keeps -----------------------------------------------------------------------------


class Keeps(nn.Module):
    """Keeps a number of each row in an attribute, and its mean over the batch."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Tanh()

    def forward(self, x: Any) -> Any:
        hidden = self.norm(self.first(x))
        self.rows, self.mean = hidden.square().sum(-1), hidden.softmax(-1).mean(0).square().sum()
        return self.last(hidden)


KEPT: dict[str, Any] = {
    "rows": lambda model: lambda o, y: F.cross_entropy(o, y) + model.rows.square().mean(),
    "mean": lambda model: lambda o, y: F.cross_entropy(o, y) + model.mean,
    "rows, masked": lambda model: lambda o, y: OF_THE_BATCH["not -100"](o, y) + model.rows.mean(),
    "sum": lambda model: lambda o, y: F.cross_entropy(o, y, reduction="sum") + model.mean,
}


def kept(name: str, norm: bool) -> None:
    torch.manual_seed(0)
    dense = Keeps(norm).double()
    made = copy.deepcopy(dense)
    x, y = batch(8)
    wanted = KEPT[name](dense)(dense(x), y)
    wanted.backward()
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(made, mesh, microbatches=4, split_at=["last"], layouts={})
        reduction = "sum" if name == "sum" else "mean"

        @monarch.program
        def step(x: Any, y: Any) -> Any:
            return pipe.step(x, target=y, loss_fn=KEPT[name](made), reduction=reduction)

        torch.testing.assert_close(step(x, y).full_tensor(), wanted.detach())
        for ours, theirs in zip(made.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "norm"), [("rows", False), ("rows", True), ("mean", False), ("sum", True)])
def test_a_loss_reads_what_the_model_keeps_of_its_own_microbatch(name: str, norm: bool) -> None:
    kept(name, norm)


def test_a_loss_of_the_batch_does_not_read_what_a_model_keeps_of_a_microbatch() -> None:
    with pytest.raises(ProgramError, match="loss_fn reads a value that the model has computed of a microbatch's rows"):
        kept("rows, masked", False)


# -- the numbers of rows -----------------------------------------------------------------------------------------------


class Numbered(nn.Module):
    def __init__(self, pick: bool) -> None:
        super().__init__()
        self.first, self.last, self.pick = nn.Linear(6, 8), nn.Linear(8, CLASSES), pick

    def forward(self, x: Any) -> Any:
        number = torch.arange(x.shape[0])
        hidden = torch.tanh(self.first(x))
        return self.last(hidden[number, :] if self.pick else hidden * number[:, None])


@pytest.mark.parametrize("pick", [False, True])
def test_a_model_that_counts_the_rows_of_its_batch(pick: bool) -> None:
    x, y = batch(8)

    def stepped(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        with partitioned_mesh(pipe=2) as mesh:
            pipe = pipeline(Numbered(pick).double(), mesh, microbatches=2, split_at=["last"], layouts={}, **options)

            @monarch.program
            def step(x: Any, y: Any) -> Any:
                return pipe.step(x, target=y, loss_fn=F.cross_entropy)

            found: torch.Tensor = step(x, y).full_tensor()
            return found

    if pick:  # each row is its own
        found = [stepped(), stepped(mixes_rows=True)]
        torch.manual_seed(0)
        wanted = F.cross_entropy(Numbered(pick).double()(x), y).detach()
        torch.testing.assert_close(found, [wanted, wanted])
        return
    with pytest.raises(
        ProgramError, match=r"takes the rows of a batch with a count(.|\n)*say pipeline\(.*, mixes_rows=True"
    ):
        stepped()
