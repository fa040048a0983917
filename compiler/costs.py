"""What a partitioned graph will cost, read off its types: ops, collectives and bytes by mesh dim."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.types import TensorType


def graph_costs(graph: Graph) -> dict[str, Any]:
    """`{"ops": n, "collectives": {"data": {"all_reduce": {"count": n, "tensors": n, "bytes": n}}}}`.

    Bytes are those that one worker puts in (for all_gather: gets out), summed over the collectives; a collective over
    several mesh dims stands under "data,model".
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
        entry["bytes"] += bytes_sent(graph, node)
    return {
        "ops": sum(1 for _ in graph.calls),
        "collectives": collectives,
    }


def bytes_sent(graph: Graph, node: fx.Node) -> int:
    """The bytes that one worker puts into a collective (for all_gather: gets out)."""
    types = node.meta["type"] if node.target is ops.all_gather else [t.meta["type"] for t in args_of(node)[0]]
    return sum(local_bytes(graph, type_) for type_ in types)


def local_bytes(graph: Graph, type_: object) -> int:
    """What one worker holds of a value of this type; 0 for None."""
    if isinstance(type_, TensorType):
        return math.prod(graph.local_shape(type_)) * type_.dtype.itemsize
    return 0
