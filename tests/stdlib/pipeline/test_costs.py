"""Stages cut by what the model's ops take, where its parameters mislead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from monarch.compiler.errors import ProgramError
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh


class Seeing(nn.Module):
    """Convolutions with few parameters on many pixels, and a classifier with many on one row."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
        self.norm = nn.BatchNorm2d(8)
        self.classify = nn.Linear(8, 4096)
        self.seen = 0

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        self.seen += 1
        return self.classify(self.norm(self.convs(x)).mean((2, 3)) * scale)


def first_stage(model: nn.Module, **options: Any) -> tuple[set[str], Any]:
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(model, mesh, microbatches=2, **options)
        return {name.rpartition(".")[0] for name, stage in pipe.stages.of.items() if not stage}, pipe


def test_convolutions_count_by_their_pixels() -> None:
    convs = [f"convs.{at}" for at in range(4)]
    found, pipe = first_stage(Seeing())
    assert found == {*convs, "norm"} and pipe.costs is None  # the classifier has nearly all parameters
    model = Seeing()
    found, pipe = first_stage(model, example=(torch.empty(8, 8, 64, 64, device="meta"),))
    assert found == set(convs[:2]) and model.seen == 1  # it is cut, and its stages have their costs, by one run
    a, b = pipe.costs
    assert 0.5 < a / b < 2
    _, pipe = first_stage(Seeing(), example={"x": torch.zeros(8, 8, 64, 64), "scale": 2.0}, split_at=["classify"])
    assert pipe.costs[0] > 20 * pipe.costs[1] > 0


def test_a_head_of_a_large_vocabulary_counts_and_its_table_does_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 64), *[nn.Linear(64, 64) for _ in range(6)], nn.Linear(64, 4096))
    found, pipe = first_stage(model, example=torch.zeros(64, 128, dtype=torch.int64))
    assert found == {str(at) for at in range(7)} and pipe.costs[1] > pipe.costs[0]


def test_the_model_is_left_as_it_was() -> None:
    model: Any = Seeing()
    random = torch.get_rng_state()
    with partitioned_mesh(pipe=2) as mesh:
        pipeline(model, mesh, microbatches=2, layouts={}, example=torch.empty(4, 8, 8, 8))
        assert torch.equal(torch.get_rng_state(), random)
        assert model.norm.running_mean.full_tensor().eq(0).all() and model.norm.num_batches_tracked.item() == 0
        assert all(parameter.grad is None for parameter in model.parameters())


def test_an_example_on_which_it_does_not_run() -> None:
    with pytest.raises(ProgramError, match="the model does not run on the example: RuntimeError"):
        first_stage(Seeing(), example=torch.zeros(4, 3, 8, 8))
