"""Which module each op of a program belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.text import parse_graph, print_graph
from monarch.distributed import Mesh


def modules_of(graph: Graph) -> dict[str, list[tuple[str, bool]]]:
    """For each op, the modules that ran it and whether it is a backward op, in order."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for node in graph.calls:
        name = str(node.target).split(".")[1]
        found.setdefault(name, []).append((provenance(node).module, provenance(node).backward))
    return found


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(2))
        self.shared = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.shared(layer(x))
        return x.tanh()


@pytest.fixture
def mesh() -> Mesh:
    return Mesh.abstract(data=2)


def test_ops_have_the_path_of_the_module_that_ran_them(mesh: Mesh) -> None:
    model = monarch.module_to_mesh(Outer(), mesh)

    @monarch.program
    def f(x: "f32[4@data, 8]") -> torch.Tensor:
        return model(x).exp()

    found = modules_of(f.trace(torch.randn(4, 8)).graph)
    assert found["mm"] == [
        ("layers.0.linear", False),
        ("shared.linear", False),
        ("layers.1.linear", False),
        ("shared.linear", False),
    ]
    assert [path for path, _ in found["relu"]] == ["layers.0", "shared", "layers.1", "shared"]
    assert found["tanh"] == [("", False)] and found["exp"] == [("", False)]


def test_backward_ops_have_that_of_their_forward_op(mesh: Mesh) -> None:
    model = monarch.module_to_mesh(Outer(), mesh)

    @monarch.program
    def f(x: "f32[4@data, 8]") -> Any:
        return torch.autograd.grad(model(x).sum(), [model.layers[0].linear.weight])

    found = modules_of(f.trace(torch.randn(4, 8)).graph)
    assert found["threshold_backward"] == [(path, True) for path in ("shared", "layers.1", "shared", "layers.0")]
    assert found["mm"][4:] and all(backward and path.endswith("linear") for path, backward in found["mm"][4:])


def test_sums_of_gradients_are_backward(mesh: Mesh) -> None:
    model = monarch.module_to_mesh(Outer(), mesh)

    @monarch.program
    def f(x: "f32[4@data, 8]") -> Any:
        return torch.autograd.grad(model(x).sum(), [model.shared.linear.weight])

    found = modules_of(f.trace(torch.randn(4, 8)).graph)
    assert found["add"] == [("shared.linear", True)]


def test_several_modules_are_told_apart_by_their_names(mesh: Mesh) -> None:
    one, two = (monarch.module_to_mesh(Inner(), mesh) for _ in range(2))

    @monarch.program
    def f(x: "f32[4@data, 8]") -> torch.Tensor:
        return two(one(x))

    graph = f.trace(torch.randn(4, 8)).graph
    assert [path for path, _ in modules_of(graph)["mm"]] == ["one.linear", "two.linear"]
    assert list(graph.states) == ["one.linear.weight", "two.linear.weight"]


def test_functional_code_has_none(mesh: Mesh) -> None:
    weight = monarch.distribute(torch.randn(8, 8), mesh, "[-, -]")

    @monarch.program
    def f(x: "f32[4@data, 8]") -> torch.Tensor:
        return F.gelu(x @ weight)

    graph = f.trace(torch.randn(4, 8)).graph
    assert all(not provenance(node).module for node in graph.calls)


def test_bound_methods(mesh: Mesh) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = monarch.module_to_mesh(Inner(), mesh)

        @monarch.program
        def step(self, x: "f32[4@data, 8]") -> torch.Tensor:
            return self.model(x)

    found = modules_of(Trainer().step.trace(torch.randn(4, 8)).graph)
    assert found["mm"] == [("linear", False)]


def test_a_module_that_fails_leaves_nothing_behind(mesh: Mesh) -> None:
    class Failing(Inner):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            if self.fails:
                raise KeyError("as meant")
            return x

    model = monarch.module_to_mesh(Failing(), mesh)

    @monarch.program
    def f(x: "f32[4@data, 8]") -> torch.Tensor:
        try:
            y = model(x)
        except KeyError:
            if model.fails is None:
                raise
            y = x
        return y.exp()

    assert modules_of(f.trace(torch.randn(4, 8)).graph)["exp"] == [("", False)]
    model.fails = None  # an error that goes through
    with pytest.raises(AttributeError):
        monarch.program(lambda x: model(x).nope)(torch.randn(4, 8))
    model.fails = False
    found = modules_of(f.trace(torch.randn(4, 8)).graph)
    assert found["mm"] == [("linear", False)] and found["exp"] == [("", False)]


def test_paths_survive_the_text_and_partitioning(mesh: Mesh) -> None:
    model = monarch.module_to_mesh(Outer(), mesh)

    @monarch.program
    def f(x: "f32[4@data, 8]") -> Any:
        return torch.autograd.grad(model(x).sum(), [model.shared.linear.weight])

    traced = f.trace(torch.randn(4, 8))
    again = parse_graph(print_graph(traced.graph, paths=True, modules=True))
    assert modules_of(again) == modules_of(traced.graph)
    partitioned = traced.partition().graph
    kept = {node.name: provenance(node).module for node in partitioned.calls}
    for node in traced.graph.calls:
        assert kept.get(node.name, provenance(node).module) == provenance(node).module
