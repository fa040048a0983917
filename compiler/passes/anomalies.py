"""Looking for the first NaN of a step, in programs that are compiled for it."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, provenance, tensor_type
from monarch.compiler.names import op_name
from monarch.compiler.ops.schema import is_view
from monarch.compiler.types import Layout, TensorType

_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
"""Ops whose results hold anything."""


class DetectAnomalies(Pass):
    """Have a step fail that gets a NaN, or makes one: each worker looks at every value, and behind them all they agree
    on the first in the program's order.

    %x = input 0                                : f32[4@data]
    %y = aten.log(%x)                           : f32[4@data]
    -->
    %x = input 0                                : f32[4@data]
    %a = find_anomaly(%x, 0, "input", "input 0: f32[4@data]", False, [])
    %y = aten.log(%x)                           : f32[4@data]
    %b = find_anomaly(%y, 1, "aten.log", "", False, [])
    %n = number_anomaly([%a, %b], ["data"])     : i64[] varying<data>
    %m = getitem(all_reduce([%n], ["data"], "min"), 0)
    %r = raise_anomaly(%m, ["data"], [])

    Views are passed over, which have the values of what they view, and padding, which may hold anything. What another
    part has sent is left to that part. The results of a branch or a loop on values count as a whole.
    """

    name = "detect-anomalies"
    regions = "none"

    def run(self, graph: Graph, context: Context) -> Graph:
        sizes = graph.mesh.sizes
        varying = TensorType(torch.bool, ()).varying_along(tuple(name for name in sizes if sizes[name] > 1))
        flags: list[fx.Node] = []
        quiet: list[int] = []
        anchor = next(node for node in graph.fx.nodes if node.op != "placeholder")
        for node in [*graph.placeholders, *graph.calls]:
            for what, text in _looked_at(node):
                given = node.op == "placeholder"
                with graph.fx.inserting_before(anchor) if given else graph.fx.inserting_after(node):
                    looked = (node, len(flags), what, text, context.options.anomaly == "inf", _padding(node))
                    found = graph.call(ops.find_anomaly, *looked, type=varying, provenance=provenance(node))
                if node.target is ops.recv:
                    quiet.append(len(flags))
                flags.append(found)
        if flags:
            with graph.fx.inserting_before(graph.fx.output_node()):
                _raise(graph, flags, quiet)
        return graph


def _looked_at(node: fx.Node) -> Iterator[tuple[str, str]]:
    """For a value that is looked at, the op that makes it, and for an input its description."""
    type_ = node.meta.get("type")
    if not isinstance(type_, TensorType) or not (type_.dtype.is_floating_point or type_.dtype.is_complex):
        return
    if node.op == "placeholder":
        label = node.meta["label"]
        yield node.meta["kind"], f"{node.meta['kind']} {label if isinstance(label, int) else repr(label)}: {type_}"
        return
    if node.target is ops.send:
        return
    target = args_of(node)[0].target if node.target is operator.getitem else node.target
    if not is_view(target) and getattr(target, "__name__", "").partition(".")[0] not in _UNFILLED:
        yield op_name(target) or str(target), ""


def _padding(node: fx.Node) -> list[list[object]]:
    """Of the dims that have padding: the dim, its size without, the mesh dims that shard it."""
    type_ = tensor_type(node)
    own = type_.unpadded.shape
    return [
        [dim, own[dim], list(type_.layout.shards[dim])] for dim in range(type_.ndim) if own[dim] != type_.shape[dim]
    ]


def _raise(graph: Graph, flags: list[fx.Node], quiet: list[int]) -> None:
    dims = [name for name, size in graph.mesh.dims if size > 1]
    varying = TensorType(torch.int64, ()).varying_along(tuple(dims))
    first = graph.call(ops.number_anomaly, flags, dims, type=varying)
    if dims:
        reduced = TensorType(torch.int64, (), Layout.replicated(0))
        several = graph.call(ops.all_reduce, [first], dims, "min", type=(reduced,))
        several.meta["why"] = "all workers learn of the first anomaly"
        first = graph.call(operator.getitem, several, 0, type=reduced)
    graph.call(ops.raise_anomaly, first, dims, quiet, type=tensor_type(first))
