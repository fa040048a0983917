"""What a partitioned graph will cost, read off its types: collectives and bytes by mesh dim, ops, and peak memory."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.partition.cost import VIEWS
from monarch.compiler.types import TensorType


def graph_costs(graph: Graph) -> dict[str, Any]:
    """`{"ops": n, "collectives": {"data": {"all_reduce": {"count": n, "tensors": n, "bytes": n}}}, "peak_bytes": n}`.

    Bytes are those that one worker puts in (for all_gather: gets out), summed over the collectives; a collective over
    several mesh dims stands under "data,model". Peak memory is what one worker holds at most, inputs and state
    included, if every value is dropped after its last use and no view costs anything.
    """
    collectives: dict[str, dict[str, dict[str, int]]] = {}
    for node in graph.calls:
        if not ops.is_collective(node.target):
            continue
        tensors, dims = args_of(node)[0], args_of(node)[1]
        entry = collectives.setdefault(",".join(dims), {}).setdefault(
            ops.name_of(node.target), {"count": 0, "tensors": 0, "bytes": 0}
        )
        entry["count"] += 1
        entry["tensors"] += len(tensors)
        types = node.meta["type"] if node.target is ops.all_gather else [t.meta["type"] for t in tensors]
        entry["bytes"] += sum(_nbytes(graph, type_) for type_ in types)
    return {
        "ops": sum(1 for _ in graph.calls),
        "collectives": collectives,
        "peak_bytes": _peak_bytes(graph),
    }


def _nbytes(graph: Graph, type_: object) -> int:
    if isinstance(type_, TensorType):
        return math.prod(graph.local_shape(type_)) * type_.dtype.itemsize
    return 0


def _peak_bytes(graph: Graph) -> int:
    nodes = list(graph.fx.nodes)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        last[node] = i
        for operand in node.all_input_nodes:
            last[operand] = i
    freed: dict[int, int] = {}
    held = peak = 0
    for i, node in enumerate(nodes):
        view = getattr(node.target, "overloadpacket", None) in VIEWS
        size = 0 if view else _nbytes(graph, node.meta.get("type"))
        held += size
        peak = max(peak, held)
        freed[last[node]] = freed.get(last[node], 0) + size
        held -= freed.pop(i, 0)
    return peak
