"""How ops with regions partition: each placement of their operands, with the results that follow from their regions.

A region is partitioned like any graph, from the placements in which the op takes its operands. A value that is carried
from one round of a loop to the next has one placement throughout, and both branches of a `cond` leave their results
alike. A predicate is whole, for every worker has to know it; no pending sum crosses the edge of a region.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.machine import BALANCED
from monarch.compiler.errors import LayoutError
from monarch.compiler.graph import Graph, args_of, provenance, tensor_type
from monarch.compiler.ops.regions import names_of
from monarch.compiler.partition.cost import GATHER, compute_cost
from monarch.compiler.partition.varying import varying_along
from monarch.compiler.rules import Rule, Strategy, tensor_operands
from monarch.compiler.symbols import example, examples
from monarch.compiler.types import Layout, Placement

ROUNDS = 8.0
"""How often a `while_loop` is taken to run, where its cost is weighed."""
REGION = "region"
"""`Strategy.factor` where a region takes something sharded."""

Placements = tuple[Placement, ...]
Partition = Callable[[Graph], Graph]
"""Partitions a graph over the mesh dim in question."""


@dataclass(frozen=True)
class RegionRule(Rule):
    """The rule of one call of an op with regions: `ways`, and the cost of each (see `cost`)."""

    ways: tuple[tuple[Strategy, float], ...] = ()

    def strategies(self, k: int) -> list[Strategy]:
        return [strategy for strategy, _ in self.ways]

    def cost(self, strategy: Strategy) -> float:
        return next(cost for way, cost in self.ways if way == strategy)


class Edge:
    """The values that cross the edge of a call's regions over one mesh dim of `size` workers."""

    def __init__(self, graph: Graph, node: fx.Node, mesh_dim: str, partition: Partition) -> None:
        self.graph, self.node, self.mesh_dim = graph, node, mesh_dim
        self.partition = partition
        args = args_of(node)
        self.carried = 0 if node.target is ops.cond else len(args[0])
        self.xs = len(args[1]) if node.target is ops.scan else 0
        self.names = names_of(node)
        self._rules: dict[object, RegionRule] = {}
        self._made: dict[object, Graph] = {}
        """Regions that were partitioned already, by name and by their operands' and results' placements."""

    @property
    def size(self) -> int:
        return self.graph.mesh.sizes[self.mesh_dim]

    def check(self, varying: set[fx.Node]) -> None:
        """Raises LayoutError where a value that varies along the mesh dim would cross the edge."""
        crossing = [operand for operand in tensor_operands(self.node) if operand in varying]
        for name in self.names:
            region = self.graph.regions[name]
            own = varying_along(region, self.mesh_dim)
            crossing += [value for value in region.returns if value in own]
        if crossing:
            raise LayoutError(
                f"%{crossing[0].name} varies along '{self.mesh_dim}', and goes into or out of a {self.node.target}",
                hint=f"reduce it first, as monarch.reduce(x, {self.mesh_dim!r}, 'avg') does; or put all of the "
                "per-worker code into the branch or the loop.",
                source=provenance(self.node).source,
            )

    def rule(self, operands: Sequence[fx.Node], reach: Sequence[Iterable[Placement]]) -> RegionRule:
        """The ways to run the call, from the placements that its operands can have."""
        able = [self.able(at, operand, found) for at, (operand, found) in enumerate(zip(operands, reach, strict=True))]
        key = tuple(map(tuple, able))
        if key not in self._rules:
            self._rules[key] = self.rule_of(operands, able)
        return self._rules[key]

    def rule_of(self, operands: Sequence[fx.Node], able: Sequence[list[Placement]]) -> RegionRule:
        """The ways to run the call, from those in which each operand can be sharded."""
        whole: Placements = (None,) * len(operands)
        natural = tuple(found[0] if found else None for found in able)
        # Weights may be gathered once in front, rather than wherever a region reads them.
        weights = [operand.op == "placeholder" and operand.meta["kind"] == "state" for operand in operands]
        gathered = tuple(None if of else p for of, p in zip(weights, natural, strict=True))
        candidates = [whole, natural, gathered]
        for at, found in enumerate(able):
            candidates += [(*natural[:at], other, *natural[at + 1 :]) for other in found[1:]]
        if self.carried:
            after = self.results(natural, None)
            follow = tuple(
                placement if placement is None or self.divides(operand, placement) else None
                for operand, placement in zip(operands, after[: self.carried], strict=False)
            )
            candidates.append((*follow, *natural[self.carried :]))
        ways: dict[Strategy, float] = {}
        for taken in dict.fromkeys(candidates):
            given, cost = self.tried(taken)
            factor = "" if all(each is None for each in taken) else REGION  # layouts in its regions are the user's
            ways[Strategy(taken, given, factor)] = cost
        types = self.node.meta["type"]
        return RegionRule(
            tuple(((),) * tensor_type(operand).ndim for operand in operands),
            tuple(((),) * type_.ndim for type_ in types),
            {},
            ways=tuple(ways.items()),
        )

    def able(self, at: int, operand: fx.Node, reach: Iterable[Placement]) -> list[Placement]:
        """The ways in which an operand can be sharded. A predicate cannot, and the dim that a scan goes along is whole
        on every worker."""
        if self.node.target is ops.cond and at == 0:
            return []
        element = self.carried <= at < self.carried + self.xs
        return [p for p in reach if isinstance(p, int) and not (element and p == 0) and self.divides(operand, p)]

    def divides(self, operand: fx.Node, placement: Placement) -> bool:
        return isinstance(placement, int) and self.graph.local_shape(tensor_type(operand))[placement] % self.size == 0

    # -- one way -------------------------------------------------------------------------------------------------------

    def tried(self, taken: Placements) -> tuple[Placements, float]:
        """The call's results where it takes its operands so, and their cost."""
        given = self.agreed(taken)
        made = self.partitioned(taken, given)
        costs = [_cost(region) for region in made.values()]
        if self.node.target is ops.cond:
            return given, max(costs)
        rounds = float(example(args_of(self.node)[4])) if self.node.target is ops.scan else ROUNDS
        return given, rounds * sum(costs)

    def agreed(self, taken: Placements) -> Placements:
        """The placements of the call's results."""
        if self.node.target is ops.while_loop:
            return taken[: self.carried]
        first = self.results(taken, None)
        if self.node.target is ops.scan:
            stacked = (None if p is None else p + 1 for p in first[self.carried :] if not isinstance(p, str))
            return (*taken[: self.carried], *stacked)
        second = self.results(taken, None, region=1)
        return tuple(one if one is not None else other for one, other in zip(first, second, strict=True))

    def results(self, taken: Placements, wanted: Placements | None, region: int = -1) -> Placements:
        """Where the results of a region (of the last: a loop's body) come to be; of a pending sum, nowhere."""
        name = self.names[0 if region < 0 and self.node.target is ops.cond else region]
        made = self.one(name, taken, wanted)
        return tuple(_sharded(tensor_type(node).layout.placement(self.mesh_dim)) for node in made.returns if node)

    def partitioned(self, taken: Placements, given: Placements) -> dict[str, Graph]:
        """The regions, partitioned, where the call takes and gives its values so."""
        wanted: dict[str, Placements] = {}
        for number, name in enumerate(self.names):
            if self.node.target is ops.cond:
                wanted[name] = given
            elif self.node.target is ops.while_loop:
                wanted[name] = given if number else (None,)
            else:
                unstacked = (None if p is None else p - 1 for p in given[self.carried :] if not isinstance(p, str))
                wanted[name] = (*given[: self.carried], *unstacked)
        return {name: self.one(name, taken, wanted[name]) for name in self.names}

    def one(self, name: str, taken: Placements, wanted: Placements | None) -> Graph:
        """One region, partitioned, with its results as they are `wanted`."""
        key = (name, self.inputs(taken), wanted)
        if key not in self._made:
            self._made[key] = self.made(name, taken, wanted)
        return self._made[key]

    def made(self, name: str, taken: Placements, wanted: Placements | None) -> Graph:
        region = self.graph.regions[name].copy()
        region.name = name
        for node, placement in zip(region.inputs, self.inputs(taken), strict=True):
            node.meta["type"] = tensor_type(node).place(self.mesh_dim, placement)
        marks: list[fx.Node] = []
        output = region.fx.output_node()
        returns: list[fx.Node | None] = []
        for at, value in enumerate(region.returns):
            assert value is not None
            if wanted is not None:
                type_ = tensor_type(value)
                text = str(Layout.replicated(type_.ndim).place(self.mesh_dim, wanted[at]))
                with region.fx.inserting_before(output):
                    value = region.call(ops.constrain, value, text, type=type_, name=f"{name.replace('.', '_')}_{at}")
                marks.append(value)
            returns.append(value)
        region.set_output(returns, {})
        names = {mark.name for mark in marks}
        made = self.partition(region)
        for node in list(made.calls):
            if node.target is ops.constrain and node.name in names:
                node.replace_all_uses_with(args_of(node)[0])
                made.fx.erase_node(node)
        return made

    def inputs(self, taken: Placements) -> Placements:
        """The placements of a region's inputs."""
        if self.node.target is ops.cond:
            return taken[1:]
        elements = (None if p is None or isinstance(p, str) else p - 1 for p in taken[self.carried :][: self.xs])
        return (*taken[: self.carried], *elements, *taken[self.carried + self.xs :], None)


def _sharded(placement: Placement) -> int | None:
    return placement if isinstance(placement, int) else None


def _cost(region: Graph) -> float:
    """A worker's cost of running a region once, in the unit of `partition.cost`, for named sizes in the example."""
    total = 0.0
    for node in region.calls:
        if node.target is operator.getitem or node.target in ops.WITH_REGIONS:
            continue
        shapes = [examples(region.local_shape(tensor_type(operand))) for operand in tensor_operands(node)]
        types = node.meta["type"]
        made = [each for each in (types if isinstance(types, tuple) else (types,)) if each is not None]
        results = [examples(region.local_shape(type_)) for type_ in made]
        if ops.is_collective(node.target):
            nbytes = sum(math.prod(shape) * type_.dtype.itemsize for shape, type_ in zip(results, made, strict=True))
            total += GATHER * nbytes + BALANCED.link.latency
        else:
            total += compute_cost(node, shapes, results)
    return total + sum(_cost(inner) for inner in region.regions.values())
