"""Choose among the alternatives: build the costs between ops, and solve for the whole graph at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from monarch.compiler import ops
from monarch.compiler.alike import Memo
from monarch.compiler.cost.machine import BALANCED
from monarch.compiler.graph import args_of
from monarch.compiler.partition.cost import FORBIDDEN, GATHER, STATE_GATHER, compute_cost, reshard_cost
from monarch.compiler.partition.margins import margins
from monarch.compiler.partition.microbatches import alike as equal_in_microbatches
from monarch.compiler.partition.options import Alternative, Options, Shape
from monarch.compiler.partition.regions import RegionRule
from monarch.compiler.partition.solve import CostNetwork
from monarch.compiler.partition.steady import check_steady
from monarch.compiler.rules import PARTIAL, Strategy
from monarch.compiler.types import Placement, TensorType, is_partial

PENDING_STATE = 1.0
"""New state prefers to be whole: a pending sum would have to be reduced by every later reader."""
PENDING_RESULT = 4.0
"""A byte of a result left as a pending sum: the controller fetches every worker's summand. It pays for a loss, not
more."""
PENDING_RESULT_OF_STEP = 2.0 * BALANCED.link.latency
"""Such a result of a step that replaces state, besides. With the summand of a worker that ends it would be lost, and
the step cannot be run again for it. The sum travels with gradients, and one worker is asked for it."""


@dataclass
class Choice:
    """The choice for one mesh dim: an alternative for every op; `exact` says whether no cheaper choice exists.

    `extra`  where it was asked for: each op's alternatives, and how much more the best whole program costs with each
             (see `margins`)
    """

    alternatives: dict[fx.Node, Alternative]
    exact: bool
    extra: dict[fx.Node, list[tuple[Alternative, float]]] = field(default_factory=dict)


def choose(options: Options, *, extra: bool = False) -> Choice:
    """The cheapest combination of alternatives. Options has them, `cost` their costs. Raises Unsteady (`steady.py`)."""
    graph = options.graph
    network = CostNetwork(keep=extra)
    variables: dict[fx.Node, int] = {}
    alternatives: dict[fx.Node, list[Alternative]] = {}
    alike = _Alike(options)
    returned, states = set(graph.returns), graph.states
    costs_of: dict[fx.Node, list[float]] = {}
    like, firsts = equal_in_microbatches(graph.calls), dict[fx.Node, fx.Node]()
    updated: dict[fx.Node, list[str]] = {}
    for label, value in graph.updates.items():
        updated.setdefault(value, []).append(label)
    for node in graph.calls:
        alternatives[node] = alike.alternatives(node)
        own = alike.own_costs(node, alternatives[node])
        if node in returned:
            pending = PENDING_RESULT * options.nbytes(node) + (PENDING_RESULT_OF_STEP if graph.updates else 0.0)
            own = [c + pending * is_partial(a.after) for c, a in zip(own, alternatives[node], strict=True)]
        for label in updated.get(node, ()):
            own = _with_update(options, states.get(label), node, alternatives[node], own)
        first = firsts.setdefault(like.get(node, node), node)
        if first is not node and alternatives[first] == alternatives[node]:
            variables[node] = variables[first]
            network.own(variables[node], own)
        else:
            variables[node] = network.variable(own)
        costs_of[node] = own
    for node in graph.calls:
        for producer in dict.fromkeys(options.operands[node]):
            if producer.op == "placeholder":
                continue  # its placement is the user's: `_own_costs` has counted it
            costs = alike.edge(node, producer, alternatives[producer], alternatives[node])
            network.pair(variables[producer], variables[node], costs)
    picked = network.solve()
    check_steady(
        list(graph.calls),
        options.operands,
        costs_of,
        lambda node, operand: alike.edge(node, operand, alternatives[operand], alternatives[node]),
        {node: picked[variable] for node, variable in variables.items()},
    )
    chosen = {node: alternatives[node][picked[variable]] for node, variable in variables.items()}
    choice = Choice(chosen, network.exact)
    if extra:
        sizes = {variable: len(alternatives[node]) for node, variable in variables.items()}
        found = margins(network, picked, list(sizes.values()))
        for node, variable in variables.items():
            choice.extra[node] = list(zip(alternatives[node], found[variable], strict=True))
    return choice


@dataclass
class _Alike:
    """Alternatives and costs of calls, worked out once for those that are alike. Its results are shared, and not to be
    changed. Keys name lists by their id: `choose` keeps all of them to its end."""

    options: Options
    listed: Memo[list[Alternative]] = field(default_factory=lambda: Memo(4096))
    costs: Memo[list[float]] = field(default_factory=lambda: Memo(4096))
    edges: Memo[np.ndarray] = field(default_factory=lambda: Memo(4096))
    computing: Memo[float] = field(default_factory=lambda: Memo(4096))

    def alternatives(self, node: fx.Node) -> list[Alternative]:
        options = self.options
        # Ops that are alike have one list of strategies, which the options keep.
        one = isinstance(node.meta["type"], TensorType)
        key = id(options.strategies[node]), one, frozenset(options.after.get(node, ()))
        found = self.listed.get(key)
        return self.listed.keep(key, _alternatives(options, node)) if found is None else found

    def own_costs(self, node: fx.Node, alternatives: list[Alternative]) -> list[float]:
        options = self.options
        if isinstance(options.rules.get(node), RegionRule):
            return _own_costs(options, node, alternatives, 0.0)
        operands = options.operands[node]
        shapes = node.target, options.shape_of(node), tuple([options.shape_of(each) for each in operands])
        whole = self.computing.get(shapes)
        if whole is None:
            whole = self.computing.keep(shapes, _compute_cost(options, node))
        nbytes = options.nbytes(node) if isinstance(node.meta["type"], TensorType) else 0.0
        given = tuple(
            [
                (at, operands.index(each), *options.reach[each][0], options.nbytes(each), each.meta["kind"])
                for at, each in enumerate(operands)
                if each.op == "placeholder"
            ]
        )
        key = id(alternatives), whole, nbytes, given
        found = self.costs.get(key)
        return self.costs.keep(key, _own_costs(options, node, alternatives, whole)) if found is None else found

    def edge(
        self, node: fx.Node, producer: fx.Node, sources: list[Alternative], alternatives: list[Alternative]
    ) -> np.ndarray:
        options = self.options
        at = tuple([i for i, operand in enumerate(options.operands[node]) if operand is producer])
        element = args_of(node)[1] if node.target is operator.getitem else None
        nbytes = options.nbytes(producer) if element is None else 0.0
        key = id(sources), id(alternatives), at, element, nbytes
        found = self.edges.get(key)
        if found is not None:
            return found
        wants = [tuple(dict.fromkeys(a.strategy.operands[i] for i in at)) for a in alternatives]
        return self.edges.keep(key, _edge(options, node, producer, sources, wants))


def _alternatives(options: Options, node: fx.Node) -> list[Alternative]:
    result = []
    for strategy in options.strategies[node]:
        gives = strategy.results[0] if strategy.results else None
        result.append(Alternative(strategy, gives))
        if not isinstance(node.meta["type"], TensorType):
            continue
        for after in sorted(options.after.get(node, ()), key=repr):
            useful = is_partial(gives) or (isinstance(gives, int) and after is None)
            if useful and after != gives and not (isinstance(after, int) and gives != "sum"):
                result.append(Alternative(strategy, after))
    return result


def _shapes(options: Options, node: fx.Node) -> Sequence[Shape]:
    shape: Any = options.shape_of(node)
    return shape if isinstance(node.meta["type"], tuple) else [shape]


def _compute_cost(options: Options, node: fx.Node) -> float:
    if node in options.edges or node.target in (operator.getitem, ops.constrain) or not options.operands[node]:
        return 0.0
    return compute_cost(node, [_shapes(options, o)[0] for o in options.operands[node]], _shapes(options, node))


def _own_costs(options: Options, node: fx.Node, alternatives: list[Alternative], whole: float) -> list[float]:
    """The cost of each alternative, where all of the op would cost one worker `whole`."""
    rule = options.rules.get(node)
    costs = []
    for alternative in alternatives:
        divided = alternative.strategy.factor not in ("", PARTIAL)
        cost = whole / options.size if divided else whole
        if isinstance(rule, RegionRule):
            cost = rule.cost(alternative.strategy)
        if alternative.after != (alternative.gives if alternative.strategy.results else None):
            cost += reshard_cost(alternative.gives, alternative.after, options.nbytes(node), options.size)
        for operand in dict.fromkeys(options.operands[node]):
            if operand.op == "placeholder":
                cost += _from_placeholder(options, node, operand, alternative.strategy)
        costs.append(cost)
    return costs


def _from_placeholder(options: Options, node: fx.Node, placeholder: fx.Node, strategy: Strategy) -> float:
    (source,) = options.reach[placeholder][0]
    cost = 0.0
    at = [i for i, operand in enumerate(options.operands[node]) if operand is placeholder]
    for target in dict.fromkeys(strategy.operands[i] for i in at):
        reshard = reshard_cost(source, target, options.nbytes(placeholder), options.size)
        if isinstance(source, int) and target is None and placeholder.meta["kind"] == "state":
            reshard *= STATE_GATHER / GATHER
        cost += reshard
    return cost


def _with_update(
    options: Options, state: TensorType | None, node: fx.Node, alternatives: list[Alternative], own: list[float]
) -> list[float]:
    """Costs with that of leaving the value in the layout of the `state` that it replaces (None: it is new)."""
    if state is None:
        return [c + (PENDING_STATE if is_partial(a.after) else 0.0) for c, a in zip(own, alternatives, strict=True)]
    target = state.layout.placement(options.mesh_dim)
    return [
        cost + _delivered(a, target, options.nbytes(node), options.size)
        for cost, a in zip(own, alternatives, strict=True)
    ]


def _delivered(alternative: Alternative, target: Placement, nbytes: float, k: int) -> float:
    """The cheaper of the two placements in which a value is at hand, brought to `target`."""
    return min(reshard_cost(source, target, nbytes, k) for source in (alternative.after, alternative.gives))


def _edge(
    options: Options,
    node: fx.Node,
    producer: fx.Node,
    sources: list[Alternative],
    wants: list[tuple[Placement, ...]],
) -> np.ndarray:
    costs = np.empty((len(sources), len(wants)))
    if node.target is operator.getitem:
        index = args_of(node)[1]
        for i, source in enumerate(sources):
            for j, want in enumerate(wants):
                costs[i, j] = 0.0 if source.strategy.results[index] == want[0] else FORBIDDEN
        return costs
    nbytes = options.nbytes(producer)
    memo: dict[tuple[Placement, Placement, Placement], float] = {}
    for i, source in enumerate(sources):
        for j, want in enumerate(wants):
            total = 0.0
            for target in want:
                key = (source.gives, source.after, target)
                if key not in memo:
                    memo[key] = _delivered(source, target, nbytes, options.size)
                total += memo[key]
            costs[i, j] = total
    return costs
