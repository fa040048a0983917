"""Of microbatches that are alike three are traced, and the others are written as these are: the program is that of
tracing all. What differs from one to the next is traced each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.tape import Tape
from monarch.language import Mesh
from monarch.language.programs import recorded
from monarch.language.programs.recorded import functionalize
from monarch.language.recorder import repeating
from monarch.language.recorder.repeating import repeat
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh

MICROBATCHES = 6


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The microbatches that are not traced."""
    found: list[int] = []

    def noted(recording: Any, like: Any, microbatch: int, given: Any) -> Any:
        found.append(microbatch)
        return repeat(recording, like, microbatch, given)

    monkeypatch.setattr(repeating, "repeat", noted)
    return found


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with partitioned_mesh(pipe=2) as mesh:
        yield mesh


class Tied(nn.Module):
    """Dropout, a tied embedding, and views of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.second = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: Any) -> Any:
        h = self.table(x)
        h = h + self.first(h)
        return F.dropout(self.second(h), 0.1) @ self.table.weight.T


def cross_entropy(output: Any, target: Any) -> Any:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def step_of(model: nn.Module, mesh: Mesh, loss_fn: Callable[..., Any], rows: int = 12, **options: Any) -> Any:
    pipe = pipeline(model, mesh, microbatches=MICROBATCHES, layouts={}, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)

    @monarch.program
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = pipe.step(x, target=y, loss_fn=loss_fn)
        optimizer.step()
        return loss

    return step


def key_of(step: Any, *args: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """What was recorded, with lines and stages, and the traced graph."""
    made: list[Tape] = []

    def noted(tape: Tape, *args: Any, **options: Any) -> Any:
        made.append(tape)
        return functionalize(tape, *args, **options)

    monkeypatch.setattr(recorded, "functionalize", noted)
    graph = step.trace(*args).graph
    (tape,) = made
    return (tape.key, [(op.source, op.backward, op.module) for op in tape.ops], tape.values), str(graph)


@pytest.mark.parametrize(("schedule", "rows"), [("1f1b", 12), ("zero-bubble", 15)])
@pytest.mark.parametrize("model", [Tied, lambda: GPT(vocabulary=11, width=8, layers=2, heads=2, sequence=4)])
def test_the_program_is_that_of_tracing_all_microbatches(
    mesh: Mesh, repeated: list[int], monkeypatch: pytest.MonkeyPatch, schedule: str, rows: int, model: Any
) -> None:
    x, y = torch.randint(0, 11, (2, rows, 4))
    split = {"split_at": ["second"]} if model is Tied else {}
    step = step_of(model(), mesh, cross_entropy, schedule=schedule, **split)
    with monkeypatch.context() as patch:
        found = key_of(step, x, y, monkeypatch=patch)
    assert repeated == ([3, 4, 5] if rows == 12 else [5])  # of 15 rows three microbatches have 3, three have 2
    repeated.clear()
    with monkeypatch.context() as patch:
        patch.setattr(repeating, "are_alike", lambda *args: False)
        assert key_of(step, x, y, monkeypatch=patch) == found
    assert not repeated


class Counting(nn.Module):
    """Scales by how many steps it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x) * self.calls


class Keeping(nn.Module):
    """Adds what it gave last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: Any = 0.0

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        made, self.last = out + self.last, out.detach()
        return made


COUNTER = itertools.count()


class Asking(nn.Module):
    """Scales by what an iterator gives, which shows nobody where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * (1 + next(COUNTER) // 3)


def test_a_model_that_counts_steps_is_traced_for_three(mesh: Mesh, repeated: list[int]) -> None:
    model = nn.Sequential(Counting(), nn.Tanh(), nn.Linear(4, 4))
    step_of(model, mesh, F.mse_loss, split_at=["2"]).trace(torch.randn(12, 4), torch.randn(12, 4))
    assert repeated == [3, 4, 5]


@pytest.mark.parametrize("kind", [Keeping, Asking])
def test_a_model_whose_microbatches_differ_is_traced_for_each(mesh: Mesh, repeated: list[int], kind: Any) -> None:
    model = nn.Sequential(kind(), nn.Tanh(), nn.Linear(4, 4))
    step = step_of(model, mesh, F.mse_loss, split_at=["2"])
    step.trace(torch.randn(12, 4), torch.randn(12, 4))
    assert not repeated


def test_a_loss_of_the_programs_own_that_counts_is_traced_for_each(mesh: Mesh, repeated: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = pipeline(model, mesh, microbatches=MICROBATCHES, split_at=["2"], layouts={})

    @monarch.program
    def step(x: Any, y: Any, counts: bool) -> Any:
        seen: list[int] = []

        def loss_fn(output: Any, target: Any) -> Any:
            if counts:
                seen.append(1)
            return F.mse_loss(output, target)

        return pipe.step(x, target=y, loss_fn=loss_fn)

    x, y = torch.randn(12, 4), torch.randn(12, 4)
    step.trace(x, y, True)
    assert not repeated
    step.trace(x, y, False)
    assert repeated == [3, 4, 5]
