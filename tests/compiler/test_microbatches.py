"""Equal microbatches of a pipeline's step are laid out as one of them is: the search weighs three, however many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.partition import choose as choosing
from monarch.compiler.partition import partition
from monarch.compiler.partition.choose import Choice, choose
from monarch.compiler.partition.solve import CostNetwork
from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh
from monarch.stdlib.parallel import fully_shard
from monarch.stdlib.pipeline import pipeline

Found = list[tuple[Choice, int, float]]
"""What was chosen for each part, of how many variables, and what it costs."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Found]:
    chosen: Found = []
    networks: list[CostNetwork] = []

    class Noted(CostNetwork):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            networks.append(self)

    def noted(*args: Any, **options: Any) -> Choice:
        choice = choose(*args, **options)
        network = networks[-1]
        chosen.append((choice, network.variables, network.cost(network.solve())))
        return choice

    monkeypatch.setattr(choosing, "CostNetwork", Noted)
    monkeypatch.setattr(partition, "choose", noted)
    return chosen


def traced(microbatches: int, schedule: str, preset: bool, rows: int = 48) -> Graph:
    torch.manual_seed(0)
    mesh = Mesh.abstract(pipe=2, data=2)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
    layouts = fully_shard(model, mesh.slice(pipe=0), "data") if preset else {}
    pipe = pipeline(model, mesh, microbatches=microbatches, schedule=schedule, split_at=["3"], layouts=layouts)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)

    @monarch.program
    def step(x: Any, y: Any) -> Any:
        x, y = monarch.layout(x, "[@data, -]"), monarch.layout(y, "[@data, -]")
        optimizer.zero_grad()
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        optimizer.step()
        return loss

    return step.trace(torch.zeros(rows, 6), torch.zeros(rows, 4)).graph


@pytest.mark.parametrize(("schedule", "preset"), [("1f1b", False), ("zero-bubble", True), ("gpipe", False)])
def test_the_search_weighs_three_microbatches_and_finds_no_worse_layouts(
    found: Found, monkeypatch: pytest.MonkeyPatch, schedule: str, preset: bool
) -> None:
    partition_graph(traced(3, schedule, preset))
    of_three = [variables for _, variables, _ in found]
    found.clear()
    graph = traced(6, schedule, preset)
    partition_graph(graph)
    assert [variables for _, variables, _ in found] == of_three
    by_three = [cost for _, _, cost in found]
    for choice, _, _ in found:
        of: dict[int, list[Any]] = {}
        for node, alternative in choice.alternatives.items():
            if (microbatch := provenance(node).microbatch) is not None:
                of.setdefault(microbatch, []).append(alternative)
        assert set(of) == set(range(6))
        assert of[1] == of[2] == of[3] == of[4]
    found.clear()
    monkeypatch.setattr(choosing, "equal_in_microbatches", lambda calls: {})
    partition_graph(graph)
    assert all(variables > of_three[0] for _, variables, _ in found)
    assert all(one <= each + 1e-6 for one, (_, _, each) in zip(by_three, found, strict=True))


def test_microbatches_of_other_sizes_are_chosen_for_by_themselves(found: Found) -> None:
    partition_graph(traced(3, "1f1b", preset=False))
    of_three = [variables for _, variables, _ in found]
    found.clear()
    partition_graph(traced(6, "1f1b", preset=False, rows=44))  # two have eight rows, four seven
    of_four = [variables for _, variables, _ in found]
    assert all(0 < more - three < 0.5 * three for more, three in zip(of_four, of_three, strict=True))
