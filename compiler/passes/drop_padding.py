"""Results get the blocks that their own layouts have, behind the partitioning of a graph with padding."""

from __future__ import annotations

import operator

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, provenance, tensor_type
from monarch.compiler.types import TensorType

aten = torch.ops.aten

Shape = tuple[int, ...]


class DropPadding(Pass):
    """Give results the blocks of their own layouts: a result that no mesh dim shards along a dim has no padding there.

    %y = aten.exp(%x)                           : f32[10+2]
    return %y
    -->
    %y = aten.exp(%x)                           : f32[10+2]
    %s = aten.slice.Tensor(%y, 0, 0, 10)        : f32[10]
    return %s
    """

    name = "drop-padding"

    def run(self, graph: Graph, context: Context) -> Graph:
        states, output = graph.states, graph.fx.output_node()
        known: dict[fx.Node, fx.Node] = {}

        def dropped(node: fx.Node) -> fx.Node:
            if node not in known:
                with graph.fx.inserting_before(output):
                    known[node] = _with_own_blocks(graph, node)
            return known[node]

        updates = {label: node if label in states else dropped(node) for label, node in graph.updates.items()}
        graph.set_output([node and dropped(node) for node in graph.returns], updates)
        return graph


def _with_own_blocks(graph: Graph, node: fx.Node) -> fx.Node:
    wanted = tensor_type(node).unpadded.padded(graph.mesh)
    of = provenance(node)
    for dim, names in enumerate(wanted.layout.shards):
        type_ = tensor_type(node)
        if type_.shape[dim] == wanted.shape[dim]:
            continue
        logical = type_.unpadded.shape[dim]
        for name in reversed(names):
            type_ = type_.place(name, None)
            several = graph.call(ops.all_gather, [node], [name], [dim], type=(type_,), provenance=of)
            node = graph.call(operator.getitem, several, 0, type=type_, provenance=of)
        type_ = resized(type_, (*type_.shape[:dim], logical, *type_.shape[dim + 1 :]))
        node = graph.call(aten.slice.Tensor, node, dim, 0, logical, type=type_, provenance=of)
        if names:
            pads = [0] * (2 * (type_.ndim - dim) - 1) + [wanted.shape[dim] - logical]
            type_ = resized(type_, (*type_.shape[:dim], wanted.shape[dim], *type_.shape[dim + 1 :]))
            node = graph.call(aten.constant_pad_nd.default, node, pads, 0, type=type_, provenance=of)
        for name in names:
            type_ = type_.place(name, dim)
            node = graph.call(ops.shard, node, name, dim, type=type_, provenance=of)
    return node


def resized(type_: TensorType, shape: Shape) -> TensorType:
    """The type with other sizes with padding."""
    padding = tuple(size - logical for size, logical in zip(shape, type_.unpadded.shape, strict=True))
    return TensorType(type_.dtype, shape, type_.layout, padding)
