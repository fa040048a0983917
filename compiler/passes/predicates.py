"""Predicates: that all workers take the same branch, and go round a loop equally often.

Each worker decides by itself, so all have to see the same bits. A replicated value is computed by every worker on its
own, and two kinds of machine may round it differently; so a predicate comes from one worker, unless it is known to be
exact.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, provenance, tensor_type
from monarch.compiler.ops.regions import names_of
from monarch.compiler.ops.schema import is_view

aten = torch.ops.aten

_EXACT = {
    getattr(aten, name)
    for name in """
    eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor where minimum maximum amax
    amin any all neg abs sign clone _to_copy full scalar_tensor zeros ones arange index_select gather cat stack
    """.split()
}
"""Ops that do not round, besides views and what computes on whole numbers alone."""

_SAME = (ops.all_reduce, ops.all_gather, ops.broadcast)
"""Collectives that give the same bits to the whole group."""


class AgreeOnPredicates(Pass):
    """Take a predicate that workers might round differently from the first of them.

    %p = aten.lt.Scalar(%loss, 0.1)             : bool[]
    %r = cond(%p, [%x], ["cond0.then", "cond0.else"])
    -->
    %p = aten.lt.Scalar(%loss, 0.1)             : bool[]
    %b = getitem(broadcast([%p], ["data"], 0), 0)
    %r = cond(%b, [%x], ["cond0.then", "cond0.else"])
    """

    name = "agree-on-predicates"
    regions = "own"

    def run(self, graph: Graph, context: Context) -> Graph:
        if _dims(graph):
            _Agree(graph, None).run()
        return graph


def disagreeing(graph: Graph) -> fx.Node | None:
    """The first op of a partitioned graph whose predicate is not known to be the same on all workers."""
    if not _dims(graph):
        return None
    found: list[fx.Node] = []
    _Agree(graph, None, found).run()
    return found[0] if found else None


class _Agree:
    """`given` says which of a region's inputs are exact; None for a whole program. With `found` nothing
    is changed: the ops whose predicates would be are put there."""

    def __init__(self, graph: Graph, given: Sequence[bool] | None, found: list[fx.Node] | None = None) -> None:
        self.graph = graph
        self.found = found
        self.results: dict[fx.Node, list[bool]] = {}
        """For each op with regions which of its results are exact."""
        self.exact: dict[fx.Node, bool] = {
            node: node.meta["kind"] in ("scalar", "seed", "constant", "input") for node in graph.placeholders
        }
        if given is not None:
            self.exact |= zip(graph.inputs, given, strict=True)

    def run(self) -> list[bool]:
        """Make every predicate agreed; gives which results are exact."""
        for node in list(self.graph.calls):
            if node.target in ops.WITH_REGIONS:
                self.regions(node)
            else:
                self.exact[node] = self.is_exact(node)
        return [self.exact[node] for node in self.graph.returns if node is not None]

    def is_exact(self, node: fx.Node) -> bool:
        operands = node.all_input_nodes
        if node.target is operator.getitem:
            producer = args_of(node)[0]
            if producer.target in ops.WITH_REGIONS:
                return self.results[producer][args_of(node)[1]]
            return self.exact[producer]
        if node.target in _SAME and set(_dims(self.graph)) <= set(args_of(node)[1]):
            return True
        if not all(self.exact[operand] for operand in operands):
            return False
        if isinstance(node.target, ops.MonarchOp):
            return node.target in _SAME or node.target is ops.check
        packet = getattr(node.target, "overloadpacket", None)
        types = [each.meta["type"] for each in (node, *operands)]
        whole = all(not isinstance(type_, tuple) and not type_.dtype.is_floating_point for type_ in types)
        return packet in _EXACT or is_view(node.target) or whole

    def regions(self, node: fx.Node) -> None:
        """Agree in an op's regions, and on its predicate."""
        args = args_of(node)
        regions = [self.graph.regions[name] for name in names_of(node)]
        self.exact[node] = False
        if node.target is ops.cond:
            if not self.exact[args[0]]:
                self.change(node, args[0])
            made = [_agree(region, [self.exact[each] for each in args[1]], self.found) for region in regions]
            results = [all(each) for each in zip(*made, strict=True)]
        else:
            *lists, _ = args if node.target is ops.while_loop else args[:4]
            carried, *rest = ([self.exact[each] for each in values] for values in lists)
            others = [exact for values in rest for exact in values]
            while True:  # a carried value is exact as long as the body keeps it so
                made_of = _agree(regions[-1], [*carried, *others, True], [])
                now = [a and b for a, b in zip(carried, made_of, strict=False)]
                if now == carried:
                    break
                carried = now
            given = [*carried, *others, True]
            results = _agree(regions[-1], given, self.found)
            results[: len(carried)] = carried
            if node.target is ops.while_loop and not all(_agree(regions[0], given, self.found)):
                self.condition(node, regions[0])
        self.results[node] = results

    def change(self, node: fx.Node, predicate: fx.Node) -> None:
        if self.found is not None:
            self.found.append(node)
            return
        with self.graph.fx.inserting_before(node):
            agreed = _broadcast(self.graph, predicate)
        self.exact[args_of(agreed)[0]] = self.exact[agreed] = True
        node.args = (agreed, *node.args[1:])

    def condition(self, node: fx.Node, region: Graph) -> None:
        if self.found is not None:
            self.found.append(node)
            return
        (predicate,) = region.returns
        assert predicate is not None
        with region.fx.inserting_before(region.fx.output_node()):
            region.set_output([_broadcast(region, predicate)], {})


def _agree(region: Graph, given: Sequence[bool], found: list[fx.Node] | None) -> list[bool]:
    return _Agree(region, given, found).run()


def _broadcast(graph: Graph, predicate: fx.Node) -> fx.Node:
    type_ = tensor_type(predicate)
    of = provenance(predicate)
    several = graph.call(ops.broadcast, [predicate], _dims(graph), 0, type=(type_,), provenance=of)
    several.meta["why"] = "all workers take the branch that the first does"
    return graph.call(operator.getitem, several, 0, type=type_, provenance=of)


def _dims(graph: Graph) -> list[str]:
    """The mesh dims along which there are several workers."""
    return [name for name, size in graph.mesh.dims if size > 1]
