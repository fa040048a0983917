"""The layouts that people know are found by themselves, where memory or the size of messages calls for each."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from monarch.compiler.cost.cluster import load_cluster
from monarch.compiler.graph import Graph
from monarch.compiler.search.layouts import FoundLayouts, layouts_of
from monarch.compiler.search.prepare import prepare
from monarch.compiler.search.problem import Problem
from monarch.compiler.search.sequence import Search
from monarch.compiler.search.why import reasons
from monarch.language import Mesh, module_to_mesh, program
from monarch.stdlib.models.gpt import GPT, MLP

H100 = load_cluster("h100-8")


def step_of(model: nn.Module, mesh: Mesh, *shape: int) -> Graph:
    """A training step of a model that keeps the shape of what it is given, in whole layouts."""
    model = module_to_mesh(model, mesh, layouts={})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return program(step, mesh=mesh).trace(torch.zeros(shape, device="meta")).graph


def search(graph: Graph, weights: float | None = None) -> tuple[FoundLayouts, str]:
    """Layouts and why, where a worker holds at most this part of the weights, and besides what it does with the
    cheapest."""
    problem = Problem(prepare(graph), H100)
    chosen = Search(problem, None, math.inf).run()
    assert chosen is not None
    if weights is not None:
        states = [kind for kind in problem.kinds if kind.is_state]
        held = sum(problem.state_bytes(kind.number, chosen[kind.number]) for kind in states)
        whole = sum(len(kind.nodes) * problem.nbytes(kind.number, 0) for kind in states)
        chosen = Search(problem, problem.memory(chosen) - held + weights * whole, math.inf).run()
        assert chosen is not None
    found = layouts_of(problem, chosen, graph, values=True)
    return found, "\n".join(reasons(problem, chosen, found))


def mlps(width: int, count: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(MLP(width) for _ in range(count)))


def test_small_weights_and_a_large_batch_are_data_parallel() -> None:
    found, why = search(step_of(mlps(64, 2), Mesh.abstract(data=8), 65536, 64))
    assert {str(layout) for layout in found.states.values()} == {"[-, -]"}
    assert str(found.inputs[0]) == "[@data, -]"
    assert "*.up.weight (2) [-, -]: replicated along data" in why


def test_what_does_not_fit_whole_is_fully_sharded() -> None:
    graph = step_of(mlps(2048, 4), Mesh.abstract(data=8), 65536, 2048)
    found, why = search(graph, weights=0.13)
    assert str(found.inputs[0]) == "[@data, -]"
    assert {str(layout) for layout in found.states.values()} <= {"[@data, -]", "[-, @data]"}
    assert "gathered for its use" in why


def test_large_weights_and_a_batch_that_does_not_divide_are_tensor_parallel() -> None:
    found, why = search(step_of(mlps(4096, 2), Mesh.abstract(model=8), 4, 4096))
    for label, layout in found.states.items():
        assert str(layout) == ("[@model, -]" if "up" in label else "[-, @model]")
    assert "*.down.weight (2) [-, @model]: each worker along model computes a summand of the results" in why


def test_norms_between_tensor_parallel_layers_are_sharded_over_the_sequence() -> None:
    mesh = Mesh.abstract(model=8)
    with torch.device("meta"):
        model = GPT(vocabulary=512, width=4096, layers=2, heads=32, sequence=512)
    model = module_to_mesh(model, mesh, layouts={})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    tokens = torch.zeros(4, 512, dtype=torch.int64)
    found, _ = search(program(step, mesh=mesh).trace(tokens, tokens).graph)
    assert str(found.states["blocks.1.mlp.up.weight"]) == "[@model, -]"
    assert str(found.states["blocks.1.mlp.down.weight"]) == "[-, @model]"
    assert "[-, @model, -]" in {str(layout) for layout in found.values.values()}


def test_equal_layers_are_one_choice() -> None:
    mesh = Mesh.abstract(data=8)
    few, many = (Problem(prepare(step_of(mlps(64, count), mesh, 1024, 64)), H100) for count in (4, 12))
    assert len(few.kinds) == len(many.kinds)
