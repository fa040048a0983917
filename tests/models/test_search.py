"""Layouts that are found cost no more, by the compiler's own estimate, than those that people write."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.cost.cluster import load_cluster
from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import CompileOptions
from monarch.compiler.search.find import find_layouts
from monarch.compiler.search.layouts import written
from monarch.compiler.types import Layout
from monarch.language import Mesh, module_to_mesh, program
from tests.models.families import FAMILIES
from tests.models.test_training import LAYOUTS

MACHINE = load_cluster("h100-8")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(300)
def test_what_is_found_costs_no_more_than_presets(family: str) -> None:
    torch.manual_seed(0)
    plain = FAMILIES[family].model()
    batch = FAMILIES[family].batch(torch.Generator().manual_seed(1))
    mesh = Mesh.abstract(data=2, model=2)
    chosen = {}
    for name, layouts in LAYOUTS.items():
        try:
            chosen[name] = layouts(plain, mesh)
        except ValueError:
            continue  # the family has no layers for it
    model = module_to_mesh(plain, mesh, layouts={})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(**batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graph = program(step, mesh=mesh).trace(**batch).graph
    if graph.regions:
        with pytest.raises(MonarchError, match="which branches or loops on values"):
            find_layouts(graph, MACHINE)
        return
    rows = {
        node.meta["label"]: Layout((("data",), *((),) * (node.meta["type"].ndim - 1)))
        for node in graph.inputs
        if node.meta["type"].ndim
    }
    presets = {name: written(graph, layouts, rows) for name, layouts in chosen.items()}
    answer = find_layouts(graph, MACHINE, presets=presets, seconds=6.0)
    assert answer.chosen.estimate is not None
    options = CompileOptions(target=MACHINE.target)
    for preset in presets.values():
        plan = compile_graph(preset.on(graph), options, report=True, cluster=MACHINE, binaries=False)
        assert answer.chosen.estimate.seconds <= estimate(plan, MACHINE).seconds
