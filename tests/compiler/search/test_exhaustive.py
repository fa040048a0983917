"""On small graphs what the solver chooses costs what the cheapest of all choices costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from monarch.compiler.cost.cluster import cluster_of, load_cluster
from monarch.compiler.graph import Graph
from monarch.compiler.search.prepare import prepare
from monarch.compiler.search.problem import Choice, Problem
from monarch.compiler.search.sequence import Search
from monarch.compiler.search.solve import GAP
from monarch.compiler.text import parse_graph

MOST = 12_000
CLUSTERS = (cluster_of("cpu"), load_cluster("h100-8"))


@st.composite
def graphs(draw: st.DrawFn, most_ops: int, mesh: str) -> Graph:
    """Chains of products and pointwise ops, with weights that are state and one that the program replaces."""
    size = draw(st.sampled_from((8, 64, 4096)))
    square = f"f32[{size}, {size}]"
    lines, values, weights = [], ["x"], 0
    for n in range(draw(st.integers(1, most_ops))):
        op = draw(st.sampled_from(("mm", "relu", "add", "t")))
        first = draw(st.sampled_from(values))
        if op == "mm":
            second = draw(st.sampled_from([*values, "w"]))
            if second == "w":
                second = f"w{weights}"
                weights += 1
            lines.append(f"%v{n} = aten.mm(%{first}, %{second}) : {square}")
        elif op == "add":
            lines.append(f"%v{n} = aten.add.Tensor(%{first}, %{draw(st.sampled_from(values))}) : {square}")
        else:
            lines.append(f"%v{n} = aten.{op}(%{first}) : {square}")
        values.append(f"v{n}")
    states = [f'%w{n} = state "w{n}" : {square}' for n in range(weights)]
    last = [f"return %{values[-1]}"]
    if weights and draw(st.booleans()):
        last = [f'update "w0" = %{values[-1]}', *last]
    text = "\n".join([f"%x = input 0 : {square}", *states, *lines, *last])
    return parse_graph(f"graph @step on {mesh} {{\n{text}\n}}")


def all_choices(problem: Problem) -> dict[int, list[Choice]]:
    dims = range(len(problem.mesh_dims))
    return {
        kind.number: problem.choices(kind.number, [problem.strategies(kind.number, at) for at in dims])
        for kind in problem.kinds
    }


def exhaustive(problem: Problem, limit: float | None) -> float:
    """The cost of the cheapest of all choices that fit."""
    every = all_choices(problem)
    assume(math.prod(map(len, every.values())) <= MOST)
    least = math.inf
    for choices in product(*every.values()):
        chosen = dict(zip(every, choices, strict=True))
        if limit is None or problem.memory(chosen) <= limit:
            least = min(least, problem.cost(chosen))
    return least


def searched(problem: Problem, limit: float | None) -> Mapping[int, Choice] | None:
    search = Search(problem, limit, math.inf)
    found = search.run()
    assert search.exact
    return found


@settings(max_examples=25, deadline=None)
@given(data=st.data(), mesh=st.sampled_from(("mesh<a=2>", "mesh<a=4>", "mesh<a=2, b=4>")))
def test_nothing_costs_less(data: st.DataObject, mesh: str) -> None:
    graph = data.draw(graphs(1 if "b" in mesh else 3, mesh))
    problem = Problem(prepare(graph), data.draw(st.sampled_from(CLUSTERS)))
    whole = sum(problem.nbytes(kind.number, 0) for kind in problem.kinds if kind.node.op == "placeholder")
    limit = data.draw(st.sampled_from((None, whole * 0.6, whole * 0.3)))
    least = exhaustive(problem, limit)
    found = searched(problem, limit)
    if found is None:
        assert least == math.inf
    else:
        assert problem.cost(found) == pytest.approx(least, rel=2 * GAP, abs=1e-9)
        assert limit is None or problem.memory(found) <= limit * (1 + 1e-6)


def test_a_smaller_limit_costs_no_less() -> None:
    text = """graph @step on mesh<a=2, b=2> {
      %x = input 0 : f32[512, 512]
      %w = state "w" : f32[512, 512]
      %v = state "v" : f32[512, 512]
      %h = aten.mm(%x, %w) : f32[512, 512]
      %r = aten.relu(%h) : f32[512, 512]
      %y = aten.mm(%r, %v) : f32[512, 512]
      return %y
    }"""
    problem = Problem(prepare(parse_graph(text)), cluster_of("cpu"))
    costs = []
    for limit in (None, 4 << 20, 2 << 20, 1 << 20, 700 << 10):
        found = searched(problem, limit)
        costs.append(math.inf if found is None else problem.cost(found))
    assert costs == sorted(costs) and costs[-1] == math.inf and costs[0] < costs[-2]
