"""What a model keeps, in buffers and attributes too, changes once a step, however many microbatches there are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with partitioned_mesh(pipe=2) as mesh:
        yield mesh


class Keeping(nn.Module):
    def __init__(self, change: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.ones(2, 6))
        self.register_buffer("steps", torch.tensor(1.0))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        self.change(self, h)
        made: torch.Tensor = self.second(h * self.steps + self.table[0] * self.scale)
        return made


class Adding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        table.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


def without_gradients(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return torch.no_grad()(change)


def assigned(name: str, value: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    return lambda model, h: setattr(model, name, value(model, h))


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a row": lambda m, h: m.table[0].add_(1),
    "a view": lambda m, h: m.table.view(-1).mul_(0.5),
    "data": lambda m, h: m.table.data.mul_(0.5),
    "out=": lambda m, h: torch.add(m.steps, 1, out=m.steps),
    "normalised, out=": lambda m, h: F.normalize(m.table + 1, dim=-1, out=m.table),
    "a list": lambda m, h: torch._foreach_mul_([m.steps, m.table], 2.0),
    "a mean of rows": lambda m, h: m.table[1].lerp_(h.detach().mean(0), 0.1),
    "in a function": lambda m, h: Adding.apply(h, m.table),
    "a parameter": without_gradients(lambda m, h: m.scale.mul_(0.9)),
    "weights of a layer": without_gradients(lambda m, h: m.first.weight.data.mul_(0.9)),
    "assigned": assigned("steps", lambda m, h: m.steps + 1),
    "assigned, a mean of rows": assigned("steps", lambda m, h: 0.9 * m.steps + h.detach().mean()),
    "assigned and changed": lambda m, h: (setattr(m, "steps", m.steps * 2), m.steps.add_(1)),
    "registered": lambda m, h: m.register_buffer("steps", m.steps + 1),
    "data assigned": lambda m, h: setattr(m.table, "data", m.table * 2),
}


def step_of(model: nn.Module, mesh: Mesh) -> tuple[Any, Any, nn.Module]:
    dense = copy.deepcopy(model)
    pipe = pipeline(model, mesh, microbatches=2, layouts={}, split_at=["second"])

    @monarch.program
    def step(x: Any, y: Any) -> Any:
        return pipe.step(x, target=y, loss_fn=F.mse_loss)

    return step, pipe, dense


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:whether the model computes")
def test_what_a_model_keeps_changes_once_a_step(mesh: Mesh, name: str) -> None:
    torch.manual_seed(0)
    step, pipe, dense = step_of(Keeping(CHANGES[name]), mesh)
    for _ in range(2):
        x, y = torch.randn(6, 6), torch.randn(6, 6)
        loss, wanted = step(x, y), F.mse_loss(dense(x), y)
        wanted.backward()
        torch.testing.assert_close(loss.full_tensor(), wanted.detach())
    ours, theirs = pipe.model.state_dict(), dense.state_dict()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key].full_tensor(), value)
    for mine, other in zip(pipe.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)


class Attributes(nn.Module):
    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls: Any = 0
        self.seen: list[Any] = []
        self.by: dict[str, Any] = {}
        self.mean: Any = torch.zeros(6)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        self.change(self, h)
        factor = 1 + self.calls + len(self.seen) + self.by.get("calls", 0)
        made: torch.Tensor = self.second(h * factor + self.mean)
        return made


@pytest.mark.parametrize(
    "change",
    [
        assigned("calls", lambda m, h: m.calls + 1),
        assigned("mean", lambda m, h: 0.9 * m.mean + 0.1 * h.detach().mean(0)),
        lambda m, h: m.seen.append(1),
        lambda m, h: m.by.update(calls=m.by.get("calls", 0) + 1),
        lambda m, h: (setattr(m, "new", 1), setattr(m, "calls", m.calls + m.new)),
    ],
    ids=["a number", "a plain tensor", "a list", "a dict", "a new one"],
)
def test_attributes_change_once_a_step(mesh: Mesh, change: Callable[[Any, Any], Any]) -> None:
    torch.manual_seed(0)
    step, pipe, dense = step_of(Attributes(change), mesh)
    for _ in range(4):
        x, y = torch.randn(6, 6), torch.randn(6, 6)
        torch.testing.assert_close(step(x, y).full_tensor(), F.mse_loss(dense(x), y).detach())
    ours: Any = pipe.model
    theirs: Any = dense
    assert (ours.calls, ours.seen, ours.by) == (theirs.calls, theirs.seen, theirs.by)


def test_rows_that_a_step_has_left_are_not_read(mesh: Mesh) -> None:
    """As a recurrent state: those of one microbatch, for the rows of all."""

    model = Attributes(lambda m, h: setattr(m, "mean", (m.mean + h).detach()))
    step, _, dense = step_of(model, mesh)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    torch.testing.assert_close(step(x, y).full_tensor(), F.mse_loss(dense(x), y).detach())
    with pytest.raises(ProgramError, match="reads its 'mean': it has the rows of a microbatch of the step before"):
        step(x, y)
    model.mean = torch.zeros(6)
    step(x, y)


def test_a_loss_adds_up_what_the_model_has_appended(mesh: Mesh) -> None:
    """As the losses that balance experts are, a mean over all rows of the batch each."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.losses: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> Any:
            h = torch.tanh(self.first(x))
            self.losses += [h.square().mean(), h.mean() ** 2]
            return self.second(h)

    def step_with(model: Any, run: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def step(x: Any, y: Any) -> Any:
            model.losses.clear()
            return run(x, y, lambda out, target: F.mse_loss(out, target) + 0.1 * sum(model.losses))

        return step

    torch.manual_seed(0)
    model = Net()
    dense = copy.deepcopy(model)
    pipe = pipeline(model, mesh, microbatches=3, layouts={}, split_at=["second"])
    step = monarch.program(step_with(model, lambda x, y, loss: pipe.step(x, target=y, loss_fn=loss)))
    plain = step_with(dense, lambda x, y, loss: loss(dense(x), y))
    for _ in range(2):
        x, y = torch.randn(6, 6), torch.randn(6, 6)
        loss, wanted = step(x, y), plain(x, y)
        wanted.backward()
        torch.testing.assert_close(loss.full_tensor(), wanted.detach())
        assert len(model.losses) == len(dense.losses) == 2
    for mine, other in zip(pipe.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)


def test_rows_of_a_microbatch_are_not_kept(mesh: Mesh) -> None:
    step, _, _ = step_of(Keeping(assigned("table", lambda m, h: h.detach())), mesh)
    with pytest.raises(ProgramError, match="assigns the rows of a microbatch to its 'table'"):
        step(torch.randn(6, 6), torch.randn(6, 6))


def test_normalisations_with_statistics_and_power_iterations(mesh: Mesh) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.utils.parametrizations.spectral_norm(nn.Conv1d(3, 6, 3))
            self.norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
            self.second = nn.Conv1d(6, 3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(torch.tanh(self.norm(self.first(x))))

    torch.manual_seed(0)
    step, pipe, dense = step_of(Net(), mesh)
    for _ in range(2):
        x, y = torch.randn(4, 3, 8), torch.randn(4, 3, 4)
        torch.testing.assert_close(step(x, y).full_tensor(), F.mse_loss(dense(x), y).detach())
    ours = pipe.model.state_dict()
    for key, value in dense.state_dict().items():
        torch.testing.assert_close(ours[key].full_tensor(), value)


@pytest.mark.filterwarnings("error")
def test_a_model_asks_for_what_is_known_of_a_mask(mesh: Mesh) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            mask = torch.ones(4, 4).tril()
            assert bool((mask == torch.ones(4, 4).tril()).all())  # as torch.nn.Transformer does
            return self.second(torch.einsum("ts,bsc->btc", mask, torch.tanh(self.first(x))))

    step, _, dense = step_of(Net(), mesh)
    x, y = torch.randn(6, 4, 6), torch.randn(6, 4, 6)
    torch.testing.assert_close(step(x, y).full_tensor(), F.mse_loss(dense(x), y).detach())


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


def test_an_argument_that_is_not_cut_is_refused(mesh: Mesh) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, batch: Any) -> Any:
            return self.second(torch.tanh(self.first(batch.x)))

    step, _, dense = step_of(Net(), mesh)
    batch, y = Batch(torch.randn(6, 6)), torch.randn(6, 6)
    with pytest.raises(ProgramError, match="is a Batch, whose tensors would not be split") as error:
        step(batch, y)
    assert "torch.export.register_dataclass(Batch)" in str(error.value.hint)
    torch.export.register_dataclass(Batch)
    torch.testing.assert_close(step(batch, y).full_tensor(), F.mse_loss(dense(batch), y).detach())
