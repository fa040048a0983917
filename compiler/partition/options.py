"""Which placements the user's layouts lead to: the alternatives among which the partitioner then chooses.

Sharding comes from the user: from the layouts of inputs, state and `layout()`. An op may shard a factor only if at
least one operand that has it is sharded so; a replicated value is not sharded to save work that nobody asked to
divide. This keeps programs predictable (a replicated input stays one), and the choice small.

A *free* value depends on no value that has a dim: a fill, a range, random numbers, and everything computed from these
alone, such as masks and the backward of `sum()`. It may be born in any placement that one of its readers takes, so that
no worker makes the whole of it to keep a shard; it leads to no sharding of its readers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import fx

from monarch.compiler import ops
from monarch.compiler.alike import Memo
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.partition.regions import Edge, Partition
from monarch.compiler.partition.varying import strategy_of, varying_along
from monarch.compiler.rules import Rule, Strategy, rule_for, tensor_operands
from monarch.compiler.symbols import example
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
    `free`        for each free value, the dims on which readers take it sharded
    `varying`     the values that vary along the mesh dim; neither these nor what ends such code have a rule
    """

    graph: Graph
    mesh_dim: str
    size: int
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    rules: dict[fx.Node, Rule] = field(default_factory=dict)
    strategies: dict[fx.Node, list[Strategy]] = field(default_factory=dict)
    reach: dict[fx.Node, list[dict[Placement, bool]]] = field(default_factory=dict)
    after: dict[fx.Node, set[Placement]] = field(default_factory=dict)
    free: dict[fx.Node, set[int]] = field(default_factory=dict)
    varying: set[fx.Node] = field(default_factory=set)
    edges: dict[fx.Node, Edge] = field(default_factory=dict)
    """For each op with regions."""
    alike: Memo[_Reached] = field(default_factory=lambda: Memo(4096))
    """The reach of ops whose operands can have the same placements, as those of equal layers can."""
    _shapes: dict[fx.Node, Shape | tuple[Shape, ...]] = field(default_factory=dict)
    _nbytes: dict[fx.Node, float] = field(default_factory=dict)

    def shape_of(self, node: fx.Node) -> Shape | tuple[Shape, ...]:
        """Local shapes over the mesh dims partitioned before this one."""
        found = self._shapes.get(node)
        if found is None:
            type_ = node.meta["type"]
            if isinstance(type_, TensorType):
                found = self.graph.local_shape(type_)
            else:
                found = tuple(self.graph.local_shape(t) if t is not None else () for t in type_)
            self._shapes[node] = found
        return found

    def nbytes(self, node: fx.Node) -> float:
        found = self._nbytes.get(node)
        if found is None:
            type_: TensorType = node.meta["type"]
            size = type_.dtype.itemsize
            for length in self.graph.local_shape(type_):
                size *= example(length)
            found = self._nbytes[node] = float(size)
        return found


@dataclass(frozen=True)
class _Reached:
    """The options of an op for the possible placements of its operands: the strategies of `rule` that it may take, the
    placements of its results (see `Options.reach`), and the operands, by position, with the dims on which these want
    them. It is shared by all ops that are alike, and not to be changed."""

    rule: Rule
    strategies: list[Strategy]
    results: list[dict[Placement, bool]]
    wants: list[tuple[int, int]]


def find_options(
    graph: Graph,
    mesh_dim: str,
    partition: Partition = lambda region: region,
    rules: dict[fx.Node, Rule] | None = None,
) -> Options:
    """Every alternative that the user's layouts lead to on `mesh_dim`; `partition` is how a region is partitioned, and
    `rules` are those of calls that are known, for the same local shapes."""
    options = Options(graph, mesh_dim, graph.mesh.sizes[mesh_dim], varying=varying_along(graph, mesh_dim))
    options.rules = {} if rules is None else rules
    wanted: dict[fx.Node, set[int]] = {}  # dims on which some user of a pending sum has its other operands sharded
    for node in graph.calls:
        is_element = node.target is operator.getitem
        options.operands[node] = [args_of(node)[0]] if is_element else tensor_operands(node)
        if node.target in ops.WITH_REGIONS:
            options.edges[node] = Edge(graph, node, mesh_dim, partition)
            options.edges[node].check(options.varying)
        if _is_free(options, node):
            options.free[node] = set()
    states, updates = graph.states, graph.updates
    for node in graph.placeholders:
        options.reach[node] = [{node.meta["type"].layout.placement(mesh_dim): True}]
    asked: dict[fx.Node, tuple[int, int]] = {}
    """How many dims readers wanted each value on when it was last reached."""
    while True:
        before = sum(map(len, (*wanted.values(), *options.free.values())))
        moved: set[fx.Node] = set()  # the placements of a value follow from its operands and from its readers' wants
        for node in graph.calls:
            now = len(wanted.get(node, ())), len(options.free.get(node, ()))
            if asked.get(node) == now and moved.isdisjoint(options.operands[node]):
                continue
            asked[node], reached = now, options.reach.get(node)
            _reach_call(options, node, wanted)
            if reached is None or not _same(reached, options.reach[node]):
                moved.add(node)
        for label, node in updates.items():
            if label in states:
                _want(options, node, states[label].layout.placement(mesh_dim), wanted)
        for node in reversed(options.free):  # a free value's readers ask it, and it asks the free values that it reads
            for strategy in options.rules[node].strategies(options.size):
                if strategy.factor and _supported(options, node, strategy):
                    for operand, placement in zip(options.operands[node], strategy.operands, strict=True):
                        _want(options, operand, placement, wanted)
        if sum(map(len, (*wanted.values(), *options.free.values()))) == before:
            return options


def _same(before: list[dict[Placement, bool]], after: list[dict[Placement, bool]]) -> bool:
    """Whether these are the same placements in the same order, in which alternatives are listed."""
    return [list(each.items()) for each in before] == [list(each.items()) for each in after]


def _is_free(options: Options, node: fx.Node) -> bool:
    """Whether a value has dims and depends on no value that has any. Operands stand before their readers."""
    if (
        node.target in (operator.getitem, ops.constrain, *ops.WITH_REGIONS)
        or not _ndim(node)
        or node in options.varying
    ):
        return False
    return all(operand in options.free or _ndim(operand) == 0 for operand in options.operands[node])


def _ndim(node: fx.Node) -> int | None:
    type_ = node.meta["type"]
    return type_.ndim if isinstance(type_, TensorType) else None


def _reach_call(options: Options, node: fx.Node, wanted: dict[fx.Node, set[int]]) -> None:
    operands = options.operands[node]
    if node.target is operator.getitem:
        producer, index = args_of(node)
        reach = dict(options.reach[producer][index])
        options.strategies[node] = [Strategy((p,), (p,), "") for p in reach]
    elif (only := strategy_of(node, options.mesh_dim, options.varying)) is not None:
        for operand, placement in zip(operands, only.operands, strict=True):
            _want(options, operand, placement, wanted)
        options.strategies[node] = [only]
        if not isinstance(node.meta["type"], TensorType):
            options.reach[node] = [{placement: True} for placement in only.results]
            return
        reach = {only.results[0]: True}
    elif node.target is ops.constrain:
        placement = parse_layout(args_of(node)[1]).placement(options.mesh_dim)
        _want(options, operands[0], placement, wanted)
        options.strategies[node] = [Strategy((placement,), (placement,), "")]
        reach = {placement: True}
    else:
        if node in options.edges:
            options.rules[node] = options.edges[node].rule(operands, [options.reach[each][0] for each in operands])
        elif node not in options.rules:
            options.rules[node] = rule_for(node, options.shape_of)
        found = _reached(options, node)
        for at, dim in found.wants:
            _want(options, operands[at], dim, wanted)
        options.strategies[node] = found.strategies
        if not isinstance(node.meta["type"], TensorType):
            options.reach[node] = found.results
            return
        reach = dict(found.results[0])
    after: set[Placement] = set()
    if any(is_partial(p) for p in reach):
        after |= {None, *wanted.get(node, ())}
        for dim in wanted.get(node, ()):
            reach[dim] = any(direct for p, direct in reach.items() if is_partial(p))
    if len(node.users) > 1 and any(isinstance(p, int) for p in reach):
        after.add(None)
    options.after[node] = after
    options.reach[node] = [reach]


def _reached(options: Options, node: fx.Node) -> _Reached:
    """The reach of an op with a rule: worked out once for ops that are alike."""
    rule, operands = options.rules[node], options.operands[node]
    key = (
        id(rule),
        frozenset(options.free[node]) if node in options.free else None,
        node.target is ops.send,
        tuple([(tuple(options.reach[each][0].items()), each in options.free, _is_state(each)) for each in operands]),
    )
    found = options.alike.get(key)
    if found is not None and found.rule is rule:
        return found
    allowed: list[Strategy] = []
    results: list[dict[Placement, bool]] = []
    wants: dict[tuple[int, int], None] = {}
    for strategy in rule.strategies(options.size):
        if not _supported(options, node, strategy):
            continue
        allowed.append(strategy)
        direct = all(_direct(options, *each) for each in zip(operands, strategy.operands, strict=True))
        while len(results) < len(strategy.results):
            results.append({})
        for reached, placement in zip(results, strategy.results, strict=True):
            reached[placement] = reached.get(placement, False) or direct
        if strategy.factor:
            wants.update(
                dict.fromkeys((at, each) for at, each in enumerate(strategy.operands) if isinstance(each, int))
            )
    return options.alike.keep(key, _Reached(rule, allowed, results, [*wants]))


def _is_state(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta["kind"] == "state")


def _supported(options: Options, node: fx.Node, strategy: Strategy) -> bool:
    """Whether an operand is sharded as `strategy` wants already, so that it brings no sharding that nobody asked for;
    of a free value, whether a reader asks for it."""
    if not strategy.factor:
        return True
    if node in options.free and strategy.results[0] in options.free[node]:
        return True
    if node.target is ops.send and any(map(is_partial, options.reach[options.operands[node][0]][0])):
        return True  # blocks of a sum are sent with half of the bytes that make it whole first
    return any(
        placement is not None and operand not in options.free and placement in options.reach[operand][0]
        for operand, placement in zip(options.operands[node], strategy.operands, strict=True)
    )


def _direct(options: Options, operand: fx.Node, placement: Placement) -> bool:
    """Whether an operand can be had in `placement` without gathering an activation."""
    if _is_state(operand):
        return True
    at_hand = {p for p, direct in options.reach[operand][0].items() if direct}
    if placement in at_hand or any(is_partial(p) for p in at_hand if not is_partial(placement)):
        return True
    return placement is not None and None in at_hand


def _want(options: Options, operand: fx.Node, placement: Placement, wanted: dict[fx.Node, set[int]]) -> None:
    if not isinstance(placement, int):
        return
    if operand in options.free:
        options.free[operand].add(placement)
        return
    reach = options.reach[operand][0]
    if placement not in reach and "sum" in reach:
        wanted.setdefault(operand, set()).add(placement)
