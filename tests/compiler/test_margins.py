"""What each alternative would cost: the exact min-marginals of the cost network, against trying everything out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.compiler.graph import Graph
from monarch.compiler.partition.choose import choose
from monarch.compiler.partition.margins import margins
from monarch.compiler.partition.options import find_options
from monarch.compiler.partition.solve import CostNetwork
from tests.compiler.programs import Program, programs

COSTS = st.one_of(st.integers(0, 50).map(float), st.just(math.inf))


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[list[float]], dict[tuple[int, int], np.ndarray]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    # One assignment is always possible: infinite costs stand for impossible pairs, never for an impossible program.
    safe = [draw(st.integers(0, size - 1)) for size in sizes]
    own = [[draw(COSTS) for _ in range(size)] for size in sizes]
    for v, at in enumerate(safe):
        own[v][at] = float(draw(st.integers(0, 50)))
    pairs = {}
    for a, b in itertools.combinations(range(len(sizes)), 2):
        if draw(st.booleans()):
            table = np.array([[draw(COSTS) for _ in range(sizes[b])] for _ in range(sizes[a])])
            table[safe[a], safe[b]] = draw(st.integers(0, 50))
            pairs[a, b] = table
    return own, pairs


def network_of(own: list[list[float]], pairs: dict[tuple[int, int], np.ndarray], limit: int = 300_000) -> CostNetwork:
    network = CostNetwork(limit=limit, keep=True)
    for costs in own:
        network.variable(costs)
    for (a, b), table in pairs.items():
        network.pair(a, b, table)
    return network


def cost_of(own: list[list[float]], pairs: dict[tuple[int, int], np.ndarray], at: tuple[int, ...]) -> float:
    total = sum(costs[i] for costs, i in zip(own, at, strict=True))
    return float(total + sum(table[at[a], at[b]] for (a, b), table in pairs.items()))


@given(networks())
@settings(max_examples=300)
def test_margins_are_those_of_trying_everything(
    made: tuple[list[list[float]], dict[tuple[int, int], np.ndarray]],
) -> None:
    own, pairs = made
    network = network_of(own, pairs)
    choice = network.solve()
    sizes = [len(costs) for costs in own]
    every = {at: cost_of(own, pairs, at) for at in itertools.product(*map(range, sizes))}
    best = min(every.values())
    assert every[tuple(choice)] == best
    found = margins(network, choice, sizes)
    for v, size in enumerate(sizes):
        for i in range(size if size > 1 else 0):
            assert found[v][i] == min(cost for at, cost in every.items() if at[v] == i) - best


@given(networks(), st.integers(1, 20))
@settings(max_examples=200)
def test_an_inexact_choice_overstates_and_never_understates(
    made: tuple[list[list[float]], dict[tuple[int, int], np.ndarray]], limit: int
) -> None:
    own, pairs = made
    network = network_of(own, pairs, limit)
    choice = network.solve()
    sizes = [len(costs) for costs in own]
    base = cost_of(own, pairs, tuple(choice))
    if math.isinf(base):
        return  # the heuristic fixed two variables at what does not go together
    found = margins(network, choice, sizes)
    every = {at: cost_of(own, pairs, at) for at in itertools.product(*map(range, sizes))}
    for v, size in enumerate(sizes):
        assert found[v][choice[v]] == 0
        for i in range(size):
            assert found[v][i] >= min(cost for at, cost in every.items() if at[v] == i) - base


def chosen_cost(graph: Graph, mesh_dim: str, only: tuple[int, int] | None = None) -> float:
    """The cost of the best choice; with `only`, of the best with alternative `only[1]` of call `only[0]`."""
    options = find_options(graph, mesh_dim)
    record: list[CostNetwork] = []
    solve = CostNetwork.solve

    def solving(self: CostNetwork) -> list[int]:
        if only is not None:
            variable, kept = only
            costs = [math.inf] * self._sizes[variable]
            costs[kept] = 0.0
            self.factors.append(type(self.factors[0])((variable,), np.array(costs)))
        record.append(self)
        picked = solve(self)
        self.picked = picked  # type: ignore[attr-defined]
        return picked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostNetwork, "solve", solving)
        choose(options)
    (network,) = record
    picked: list[int] = network.picked  # type: ignore[attr-defined]
    return float(sum(f.table[tuple(picked[v] for v in f.scope)] for f in network.factors))


@given(programs(max_ops=6))
@settings(max_examples=25)
def test_an_alternatives_extra_is_what_forcing_it_costs(program: Program) -> None:
    """Solving anew with an op held to one alternative gives the program whose cost `extra` tells beforehand."""
    graph = program.graph
    mesh_dim = next((name for name, size in graph.mesh.dims if size > 1), None)
    if mesh_dim is None:
        return
    choice = choose(find_options(graph, mesh_dim), extra=True)
    assert choice.exact
    base = chosen_cost(graph, mesh_dim)
    for variable, node in enumerate(graph.calls):
        for i, (_, extra) in enumerate(choice.extra[node]):
            if len(choice.extra[node]) > 1 and not math.isinf(extra):
                assert extra == pytest.approx(chosen_cost(graph, mesh_dim, (variable, i)) - base, abs=0.01)
