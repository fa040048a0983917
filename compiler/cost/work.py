"""The cost of a partitioned graph, read off its types: ops, collectives and bytes by mesh dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.cluster import Cluster, cluster_of
from monarch.compiler.cost.flops import is_attention, matrix_flops
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.loops.contraction import contraction
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.ops.regions import regions_of
from monarch.compiler.ops.schema import is_view
from monarch.compiler.plan.report import Collectives
from monarch.compiler.rules import tensor_operands
from monarch.compiler.symbols import example, examples
from monarch.compiler.text import op_name
from monarch.compiler.types import TensorType


@dataclass(frozen=True)
class Work:
    """One worker's work for a call: floating-point operations, bytes of local memory read and written, estimated
    seconds, bytes sent, and for an op with regions the collectives that these run."""

    flops: float = 0.0
    moved: int = 0
    seconds: float = 0.0
    sent: int = 0
    within: tuple[Collectives, ...] = ()


def graph_costs(graph: Graph, cluster: Cluster | None = None) -> dict[str, Any]:
    """`{"ops": n, "collectives": {"data": {"all_reduce": {"count": n, "tensors": n, "bytes": n}}}}`.

    The ops are those of the graph and its regions, each once. The collectives are those of a step: of a region as often
    as it runs (see `region_work`). Bytes are those that one worker puts in (for all_gather: gets out), summed over the
    collectives; a collective over several mesh dims stands under "data,model".
    """
    cluster = cluster or cluster_of("cpu")
    collectives: dict[str, dict[str, dict[str, int]]] = {}
    for node in (node for node in graph.calls if node.target in ops.WITH_REGIONS or ops.is_collective(node.target)):
        for each in _collectives_of(graph, node, node_work(graph, node, cluster, 1)):
            entry = collectives.setdefault(",".join(each.mesh_dims), {}).setdefault(
                each.op, {"count": 0, "tensors": 0, "bytes": 0}
            )
            entry["count"] += each.count
            entry["tensors"] += each.tensors
            entry["bytes"] += each.sent
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
    """One worker's bytes of a value of this type; 0 for None."""
    if isinstance(type_, TensorType):
        return math.prod(graph.local_shape(type_)) * type_.dtype.itemsize
    return 0


def node_work(graph: Graph, node: fx.Node, cluster: Cluster, takes: int) -> Work:
    """One worker's work on `cluster` for a call that takes `takes` bytes of memory, for named sizes in the example."""
    if node.target in ops.WITH_REGIONS:
        return region_work(graph, node, cluster)
    machine = cluster.machine
    types = node.meta["type"] if isinstance(node.meta["type"], tuple) else (node.meta["type"],)
    if ops.is_collective(node.target):
        sent = bytes_sent(graph, node)
        moved = sum(example(local_bytes(graph, each.meta["type"])) for each in args_of(node)[0])
        moved += sum(example(local_bytes(graph, each)) for each in types)
        took = cluster.seconds_of(ops.name_of(node.target), sent, graph.mesh, args_of(node)[1])
        return Work(0.0, moved, took, sent)
    if node.target is ops.wait:
        return Work()  # the collective has all of it
    packet = getattr(node.target, "overloadpacket", node.target)
    made = [each for each in types if each is not None]
    dtype, name = (made[0].dtype, made[0].dtype_name) if made else (torch.float32, "f32")
    if op_name(node.target) == "getitem" or (is_view(node.target) and not takes):
        return Work(seconds=0.0 if op_name(node.target) == "getitem" else machine.op_seconds(name, 0.0, 0))
    operands = [each.meta["type"] for each in tensor_operands(node)]
    read = [examples(graph.local_shape(each)) for each in operands]
    results = [() if each is None else examples(graph.local_shape(each)) for each in types]
    flops = matrix_flops(packet, read, results) if read and results else 0.0
    if node.target is ops.kernel:
        nests = parse_kernel(args_of(node)[1]).nests
        flops = 2.0 * sum(math.prod(nest.dims) for nest in nests if contraction(nest) is not None)
    if not flops and not is_view(node.target) and dtype.is_floating_point:
        flops = float(max([math.prod(shape) for shape in (*read, *results)], default=0))  # one an element
    moved = sum(example(local_bytes(graph, each)) for each in (*operands, *made))
    peak = machine.attention if is_attention(packet) else 1.0
    return Work(flops, moved, machine.op_seconds(name, flops / peak, moved))


def region_work(graph: Graph, node: fx.Node, cluster: Cluster) -> Work:
    """One worker's work for an op with regions: of a cond the more expensive branch, of a scan its body in all rounds,
    of a while_loop one round, for their number is not known. Collectives started ahead hide nothing here."""
    each = [_graph_work(region, cluster) for region in regions_of(graph, node)]
    if node.target is ops.cond:
        return max(each, key=lambda work: work.seconds)
    return _repeated(each, example(args_of(node)[4]) if node.target is ops.scan else 1)


def _graph_work(graph: Graph, cluster: Cluster) -> Work:
    found = []
    for node in graph.calls:
        work = node_work(graph, node, cluster, 0)
        if fused := provenance(node).fused:  # a kernel's operations are those of the ops that it stands for
            work = replace(work, flops=sum(node_work(graph, each, cluster, 0).flops for each in fused))
        found.append(replace(work, within=_collectives_of(graph, node, work)))
    return _repeated(found, 1)


def _repeated(each: Sequence[Work], times: int) -> Work:
    """The work of several together, so many times over."""
    together: dict[tuple[str, tuple[str, ...]], Collectives] = {}
    for one in (one for work in each for one in work.within):
        kept = together.get((one.op, one.mesh_dims), Collectives(one.op, one.mesh_dims, 0, 0, 0, 0.0))
        together[one.op, one.mesh_dims] = Collectives(
            one.op,
            one.mesh_dims,
            kept.count + one.count * times,
            kept.tensors + one.tensors * times,
            kept.sent + one.sent * times,
            kept.seconds + one.seconds * times,
        )
    return Work(
        sum(work.flops for work in each) * times,
        sum(work.moved for work in each) * times,
        sum(work.seconds for work in each) * times,
        sum(work.sent for work in each) * times,
        tuple(one for one in together.values() if one.count),
    )


def _collectives_of(graph: Graph, node: fx.Node, work: Work) -> tuple[Collectives, ...]:
    if not ops.is_collective(node.target):
        return work.within
    tensors, dims = args_of(node)[0], tuple(args_of(node)[1])
    return (Collectives(ops.name_of(node.target), dims, 1, len(tensors), work.sent, work.seconds),)
