"""Pipelines on workers: a small GPT in stages against the same model without, with an optimizer; and a stage that
fails."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import DeviceIndexError
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.pipeline import Pipeline, pipeline


@pytest.fixture(scope="module")
def four() -> Iterator[Mesh]:
    with Mesh(pipe=4) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def two() -> Iterator[Mesh]:
    with Mesh(pipe=2, data=2) as mesh:
        yield mesh


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def training(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> Any:
    @monarch.program
    def step(tokens: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        loss = pipe.step(tokens, target=targets, loss_fn=loss_fn)
        optimizer.step()
        return loss

    return step


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "schedule", "virtual"),
    [
        ("four", "gpipe", 1),
        ("four", "1f1b", 1),
        ("four", "zero-bubble", 1),
        ("two", "1f1b", 1),
        ("two", "interleaved", 2),
    ],
)
def test_a_gpt_in_stages_trains_as_the_gpt_without(
    request: pytest.FixtureRequest, name: str, schedule: str, virtual: int
) -> None:
    mesh: Mesh = request.getfixturevalue(name)
    torch.manual_seed(0)
    model = GPT(vocabulary=13, width=8, layers=4, heads=2, sequence=6)
    dense = copy.deepcopy(model)
    pipe = pipeline(model, mesh, microbatches=4 if name == "four" else 2, schedule=schedule, virtual=virtual)
    step = training(pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01))
    theirs = torch.optim.AdamW(dense.parameters(), lr=0.01)
    for _ in range(2):
        tokens, targets = torch.randint(0, 13, (2, 8, 6))
        targets[torch.rand(8, 6) < 0.3] = -100
        theirs.zero_grad()
        wanted = loss_fn(dense(tokens), targets)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(step(tokens, targets).full_tensor(), wanted.detach())
    for ours, other in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), other.detach(), rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


class Looking(nn.Module):
    """Looks rows up, and finds none where what it is given is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Embedding(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h + self.table((h.abs() > 1e6).long().sum(-1) * 100)


def test_a_stage_that_fails_raises_with_its_line_and_the_meshes_go_on(four: Mesh) -> None:
    torch.manual_seed(0)
    pipe = pipeline([Looking() for _ in range(4)], four, microbatches=2, layouts={})
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    @monarch.program
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        optimizer.step()
        return loss

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    step(x, y).item()
    weight = pipe.model[2].layer.weight  # type: ignore[index]
    kept = weight.full_tensor()
    before = pipe.model[0].layer.weight.full_tensor()  # type: ignore[index]
    with torch.no_grad():
        weight.fill_(1e9)
    with pytest.raises(DeviceIndexError, match="index out of range") as raised:
        step(x, y).item()
    assert "worker pipe=2" in str(raised.value) and "test_on_workers.py" in str(raised.value)
    assert torch.equal(pipe.model[0].layer.weight.full_tensor(), before)  # type: ignore[index]
    with torch.no_grad():
        weight.copy_(monarch.distribute(kept, weight.mesh))
    assert step(x, y).isfinite().item()
