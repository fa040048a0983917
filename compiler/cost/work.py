"""What a partitioned graph will cost, read off its types: ops, collectives and bytes by mesh dim."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.cost.flops import is_attention, matrix_flops
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.loops.contraction import contraction
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.ops.schema import is_view
from monarch.compiler.rules import tensor_operands
from monarch.compiler.symbols import example
from monarch.compiler.text import op_name
from monarch.compiler.types import TensorType


def graph_costs(graph: Graph) -> dict[str, Any]:
    """`{"ops": n, "collectives": {"data": {"all_reduce": {"count": n, "tensors": n, "bytes": n}}}}`.

    Regions count once. Bytes are those that one worker puts in (for all_gather: gets out), summed over the collectives;
    a collective over several mesh dims stands under "data,model".
    """
    collectives: dict[str, dict[str, dict[str, int]]] = {}
    for node in (node for each in with_regions(graph) for node in each.calls):
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
        "ops": sum(1 for each in with_regions(graph) for _ in each.calls),
        "collectives": collectives,
    }


def with_regions(graph: Graph) -> Iterator[Graph]:
    """A graph and the regions of its ops, and theirs."""
    yield graph
    for region in graph.regions.values():
        yield from with_regions(region)


def bytes_sent(graph: Graph, node: fx.Node) -> int:
    """The bytes that one worker puts into a collective (for all_gather: gets out), for named sizes in the example."""
    types = node.meta["type"] if node.target is ops.all_gather else [t.meta["type"] for t in args_of(node)[0]]
    return sum(example(local_bytes(graph, type_)) for type_ in types)


def local_bytes(graph: Graph, type_: object) -> int:
    """What one worker holds of a value of this type; 0 for None."""
    if isinstance(type_, TensorType):
        return math.prod(graph.local_shape(type_)) * type_.dtype.itemsize
    return 0


def node_work(graph: Graph, node: fx.Node, cluster: Cluster, takes: int) -> tuple[float, int, float, int]:
    """What one worker does for a call that takes `takes` bytes of memory: operations, bytes of local memory read and
    written, estimated seconds on `cluster`, and bytes sent."""
    machine = cluster.machine
    types = node.meta["type"] if isinstance(node.meta["type"], tuple) else (node.meta["type"],)
    if ops.is_collective(node.target):
        sent = bytes_sent(graph, node)
        moved = sum(local_bytes(graph, each.meta["type"]) for each in args_of(node)[0])
        moved += sum(local_bytes(graph, each) for each in types)
        return 0.0, moved, cluster.seconds_of(ops.name_of(node.target), sent, graph.mesh, args_of(node)[1]), sent
    if node.target is ops.wait:
        return 0.0, 0, 0.0, 0  # the collective has all of it
    packet = getattr(node.target, "overloadpacket", node.target)
    made = [each for each in types if each is not None]
    dtype, name = (made[0].dtype, made[0].dtype_name) if made else (torch.float32, "f32")
    if op_name(node.target) == "getitem" or (is_view(node.target) and not takes):
        return 0.0, 0, 0.0 if op_name(node.target) == "getitem" else machine.op_seconds(name, 0.0, 0), 0
    operands = [each.meta["type"] for each in tensor_operands(node)]
    read = [graph.local_shape(each) for each in operands]
    results = [() if each is None else graph.local_shape(each) for each in types]
    flops = matrix_flops(packet, read, results) if read and results else 0.0
    if node.target is ops.kernel:
        nests = parse_kernel(args_of(node)[1]).nests
        flops = 2.0 * sum(math.prod(nest.dims) for nest in nests if contraction(nest) is not None)
    if not flops and not is_view(node.target) and dtype.is_floating_point:
        flops = float(max([math.prod(shape) for shape in (*read, *results)], default=0))  # one an element
    moved = sum(local_bytes(graph, each) for each in (*operands, *made))
    peak = machine.attention if is_attention(packet) else 1.0
    return flops, moved, machine.op_seconds(name, flops / peak, moved), 0
