"""Which placements the user's layouts lead to: the alternatives among which the partitioner then chooses.

Sharding comes from the user: from the layouts of inputs, state and `layout()`. An op may shard a factor only if at
least one operand that has it already lies so; what is replicated is not cut to save work that nobody asked to
divide. This keeps programs predictable (a replicated input stays one), and the choice small.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.rules import Rule, Strategy, rule_for, tensor_operands
from monarch.compiler.text import parse_layout
from monarch.compiler.types import Placement, TensorType, is_partial

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Alternative:
    """One way to run an op: a strategy, and where its (single) result goes right behind it, if it is resharded
    there."""

    strategy: Strategy
    after: Placement

    @property
    def gives(self) -> Placement:
        return self.strategy.results[0]


@dataclass
class Options:
    """The alternatives of one graph over one mesh dim.

    `reach`       for each value, the placements that ops can give it, and whether one does so without an activation
                  having been gathered for it. By result for ops with several.
    `strategies`  the allowed strategies of each op
    `after`       for each value, the placements that it may be brought to once, for all of its users
    """

    graph: Graph
    mesh_dim: str
    size: int
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    rules: dict[fx.Node, Rule] = field(default_factory=dict)
    strategies: dict[fx.Node, list[Strategy]] = field(default_factory=dict)
    reach: dict[fx.Node, list[dict[Placement, bool]]] = field(default_factory=dict)
    after: dict[fx.Node, set[Placement]] = field(default_factory=dict)

    def shape_of(self, node: fx.Node) -> Shape | tuple[Shape, ...]:
        """Local shapes over the mesh dims partitioned before this one."""
        type_ = node.meta["type"]
        if isinstance(type_, TensorType):
            return self.graph.local_shape(type_)
        return tuple(self.graph.local_shape(t) if t is not None else () for t in type_)

    def nbytes(self, node: fx.Node) -> float:
        type_: TensorType = node.meta["type"]
        size = type_.dtype.itemsize
        for length in self.graph.local_shape(type_):
            size *= length
        return float(size)


def find_options(graph: Graph, mesh_dim: str) -> Options:
    """Every alternative that the user's layouts lead to on `mesh_dim`."""
    options = Options(graph, mesh_dim, graph.mesh.sizes[mesh_dim])
    wanted: dict[fx.Node, set[int]] = {}  # dims on which some user of a pending sum has its other operands sharded
    for node in graph.calls:
        is_element = node.target is operator.getitem
        options.operands[node] = [args_of(node)[0]] if is_element else tensor_operands(node)
    states, updates = graph.states, graph.updates
    while True:
        before = sum(map(len, wanted.values()))
        for node in graph.fx.nodes:
            if node.op == "placeholder":
                placement = node.meta["type"].layout.placement(mesh_dim)
                options.reach[node] = [{placement: True}]
            elif node.op == "call_function":
                _reach_call(options, node, wanted)
        for label, node in updates.items():
            if label in states:
                _want(options, node, states[label].layout.placement(mesh_dim), wanted)
        if sum(map(len, wanted.values())) == before:
            return options


def _reach_call(options: Options, node: fx.Node, wanted: dict[fx.Node, set[int]]) -> None:
    operands = options.operands[node]
    if node.target is operator.getitem:
        producer, index = args_of(node)
        reach = dict(options.reach[producer][index])
        options.strategies[node] = [Strategy((p,), (p,), "") for p in reach]
    elif node.target is ops.constrain:
        placement = parse_layout(args_of(node)[1]).placement(options.mesh_dim)
        _want(options, operands[0], placement, wanted)
        options.strategies[node] = [Strategy((placement,), (placement,), "")]
        reach = {placement: True}
    else:
        if node not in options.rules:
            options.rules[node] = rule_for(node, options.shape_of)
        allowed: list[Strategy] = []
        results: list[dict[Placement, bool]] = []
        for strategy in options.rules[node].strategies(options.size):
            if not _supported(options, operands, strategy):
                continue
            allowed.append(strategy)
            direct = all(map(partial(_direct, options), operands, strategy.operands))
            while len(results) < len(strategy.results):
                results.append({})
            for reached, placement in zip(results, strategy.results, strict=True):
                reached[placement] = reached.get(placement, False) or direct
            if strategy.factor:
                for operand, placement in zip(operands, strategy.operands, strict=True):
                    _want(options, operand, placement, wanted)
        options.strategies[node] = allowed
        if not isinstance(node.meta["type"], TensorType):
            options.reach[node] = results
            return
        reach = results[0]
    after: set[Placement] = set()
    if any(is_partial(p) for p in reach):
        after |= {None, *wanted.get(node, ())}
        for dim in wanted.get(node, ()):
            reach[dim] = any(direct for p, direct in reach.items() if is_partial(p))
    if len(node.users) > 1 and any(isinstance(p, int) for p in reach):
        after.add(None)
    options.after[node] = after
    options.reach[node] = [reach]


def _supported(options: Options, operands: list[fx.Node], strategy: Strategy) -> bool:
    """Whether an operand already lies as `strategy` wants, so that it brings no sharding that nobody asked for."""
    return not strategy.factor or any(
        placement is not None and placement in options.reach[operand][0]
        for operand, placement in zip(operands, strategy.operands, strict=True)
    )


def _direct(options: Options, operand: fx.Node, placement: Placement) -> bool:
    """Whether an operand can be had in `placement` without gathering an activation."""
    if operand.op == "placeholder" and operand.meta["kind"] == "state":
        return True
    at_hand = {p for p, direct in options.reach[operand][0].items() if direct}
    if placement in at_hand or any(is_partial(p) for p in at_hand if not is_partial(placement)):
        return True
    return placement is not None and None in at_hand


def _want(options: Options, operand: fx.Node, placement: Placement, wanted: dict[fx.Node, set[int]]) -> None:
    reach = options.reach[operand][0]
    if isinstance(placement, int) and placement not in reach and "sum" in reach:
        wanted.setdefault(operand, set()).add(placement)
