"""Make the collectives that the partitioner left fewer and larger."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, provenance, tensor_type
from monarch.compiler.ops.schema import is_view
from monarch.compiler.passes.simplify import erase_dead
from monarch.compiler.states import StateKey
from monarch.compiler.symbols import example

BUCKET_BYTES = 32 * 2**20
"""Past this size joining saves nothing: one collective's fixed cost is then far below what its bytes take."""


class SimplifyReductions(Pass):
    """Reduce no more than is used, and over all mesh dims at once.

    %r = getitem(all_reduce([%p], ["data"], "sum"), 0)
    %s = shard(%r, "data", 0)                              # the only use of %r
    -->
    %s = getitem(reduce_scatter([%p], ["data"], [0], "sum"), 0)

    %r = getitem(all_reduce([%p], ["model"], "sum"), 0)
    %s = getitem(all_reduce([%r], ["data"], "sum"), 0)     # the only use of %r
    -->
    %s = getitem(all_reduce([%p], ["model", "data"], "sum"), 0)
    """

    name = "simplify-reductions"

    def run(self, graph: Graph, context: Context) -> Graph:
        for node in list(graph.calls):
            if node.target is ops.shard and (reduce := _sole_all_reduce(args_of(node)[0], node)):
                (tensor,), dims, reduction = args_of(reduce)
                if list(dims) == [args_of(node)[1]]:
                    _replace_collective(graph, node, ops.reduce_scatter, [tensor], dims, [args_of(node)[2]], reduction)
            elif node.target is ops.all_reduce and len(args_of(node)[0]) == 1:
                inner = _sole_all_reduce(args_of(node)[0][0], node)
                if inner is not None and args_of(inner)[2] == args_of(node)[2]:
                    node.args = (args_of(inner)[0], [*args_of(inner)[1], *args_of(node)[1]], args_of(node)[2])
                    reasons = [str(each.meta["why"]) for each in (inner, node) if each.meta.get("why")]
                    named = (*inner.meta.get("named", ()), *node.meta.get("named", ()))
                    for result in node.users:
                        result.meta.update(reason="; ".join(dict.fromkeys(reasons)), named=named)
        erase_dead(graph)
        return graph


def _sole_all_reduce(value: object, user: fx.Node) -> fx.Node | None:
    """The single-tensor all_reduce that makes `value`, if only `user` reads it."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem or set(value.users) != {user}:
        return None
    producer = args_of(value)[0]
    if isinstance(producer, fx.Node) and producer.target is ops.all_reduce and len(args_of(producer)[0]) == 1:
        return producer if not _returned(value) else None
    return None


def _returned(value: fx.Node) -> bool:
    return any(user.op == "output" for user in value.users)


def _replace_collective(graph: Graph, node: fx.Node, op: ops.MonarchOp, *args: object) -> None:
    type_ = node.meta["type"]
    with graph.fx.inserting_before(node):
        several = graph.call(op, *args, type=(type_,), provenance=provenance(node))
        one = graph.call(operator.getitem, several, 0, type=type_, provenance=provenance(node))
    several.meta.update({key: node.meta[key] for key in ("why", "named") if key in node.meta})
    one.meta.update({key: node.meta[key] for key in _KEPT if key in node.meta})
    one.meta["reason"] = node.meta.get("why", "")
    node.replace_all_uses_with(one)
    graph.fx.erase_node(node)


_KEPT = ("key", "stands_for", "decisions", "named")
"""The part of a value's meta that is as true of the value that takes its place."""


class JoinCollectives(Pass):
    """Let small collectives travel together: gradients in buckets, and a layer's parameters at once.

        %a = getitem(all_reduce([%g], ["data"], "sum"), 0)
        %b = getitem(all_reduce([%h], ["data"], "sum"), 0)
        -->
        %r = all_reduce([%g, %h], ["data"], "sum")
        %a = getitem(%r, 0)
        %b = getitem(%r, 1)

    Collectives of one kind can be joined if some point of the program comes after all of their inputs and before all of
    their uses. Parameters are gathered layer by layer, as late as they can be, and their gradients scattered layer
    by layer, as early, so that no more than a layer is ever whole; everything else is joined up to BUCKET_BYTES.
    """

    name = "join-collectives"

    def run(self, graph: Graph, context: Context) -> Graph:
        at: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.fx.nodes)}
        first_call = next((i for node, i in at.items() if node.op != "placeholder"), 0)
        labels = _update_labels(graph)
        buckets: dict[object, list[_Bucket]] = {}
        for node in list(graph.calls):
            if ops.is_collective(node.target):
                bucket = _bucket_of(node, at, first_call, labels)
                open_ = buckets.setdefault(bucket.key, [])
                if not (open_ and open_[-1].join(bucket)):
                    open_.append(bucket)
        for several in buckets.values():
            for bucket in several:
                if len(bucket.members) > 1 or bucket.late:
                    _emit(graph, bucket, at)
        graph.reorder(at)
        return graph


@dataclass
class _Bucket:
    """Collectives to be joined: they can run anywhere after position `earliest` and before `latest`."""

    key: object
    members: list[fx.Node]
    earliest: float
    latest: float
    nbytes: int
    late: bool = field(default=False)

    def join(self, other: _Bucket) -> bool:
        earliest, latest = max(self.earliest, other.earliest), min(self.latest, other.latest)
        if earliest >= latest or self.nbytes + other.nbytes > BUCKET_BYTES:
            return False
        self.members += other.members
        self.earliest, self.latest, self.nbytes = earliest, latest, self.nbytes + other.nbytes
        return True


def _bucket_of(node: fx.Node, at: dict[fx.Node, float], first_call: float, labels: dict[fx.Node, str]) -> _Bucket:
    tensors, dims, *rest = args_of(node)
    results = [user for user in node.users if user.target is operator.getitem]
    latest = min((first_use(result, at) for result in results), default=len(at))
    inputs = [at[t] for t in tensors]
    chained = any(_is_collective_result(t) for t in tensors)
    earliest = at[node] if chained else max(*inputs, first_call - 1)
    group = ""
    state = all(t.op == "placeholder" and t.meta["kind"] == "state" for t in tensors)
    if state:
        phase = "backward" if provenance(node).backward else "forward"
        group = f"{phase} {StateKey.of(str(tensors[0].meta['label'])).layer}"
    elif node.target is ops.reduce_scatter:
        group = StateKey.of(next((labels[r] for r in results if r in labels), "")).layer
    reduction = next((r for r in rest if isinstance(r, (str, int))), "")
    key: tuple[object, ...] = (ops.name_of(node.target), tuple(dims), str(reduction), group)
    nbytes = sum(example(tensor_type(t).nbytes) for t in tensors)
    if node.target is ops.permute:
        key += (str(rest),)
    return _Bucket(key, [node], earliest, latest, nbytes, late=state)


def first_use(value: fx.Node, at: dict[fx.Node, float]) -> float:
    """The position of the first op that reads the value or a view of it: views wait with their base."""
    return min(
        (first_use(user, at) if is_view(user.target) else at[user] for user in value.users),
        default=len(at),
    )


def _is_collective_result(value: fx.Node) -> bool:
    """Whether the value is a collective's result, or a view of it."""
    while is_view(value.target):
        value = args_of(value)[0]
    producer = args_of(value)[0] if value.target is operator.getitem else None
    return isinstance(producer, fx.Node) and ops.is_collective(producer.target)


def _update_labels(graph: Graph) -> dict[fx.Node, str]:
    """For each value, a state that it flows into: whose gradient it is, if it is one."""
    labels: dict[fx.Node, str] = {}
    for label, node in graph.updates.items():
        labels.setdefault(node, label)
    for node in reversed(list(graph.calls)):
        if node in labels:
            for operand in node.all_input_nodes:
                labels.setdefault(operand, labels[node])
    return labels


def _emit(graph: Graph, bucket: _Bucket, at: dict[fx.Node, float]) -> None:
    """Let the first member do what all do, and all their results be its; `at` says where it belongs."""
    joined, *others = bucket.members
    tensors: list[fx.Node] = []
    types: list[Any] = []
    rest: list[Any] = [list(each) if isinstance(each, (list, tuple)) else each for each in args_of(joined)[2:]]
    at[joined] = bucket.latest - 0.5 if bucket.late else bucket.earliest + 0.5
    for member in bucket.members:
        for result in list(member.users):
            result.args = (joined, len(tensors) + args_of(result)[1])
            at[result] = at[joined]
        tensors += args_of(member)[0]
        types += member.meta["type"]
        for j, argument in enumerate(args_of(member)[2:]):
            if member is not joined and isinstance(argument, (list, tuple)) and member.target is not ops.permute:
                rest[j] += argument
    module = _common_path([provenance(member).module for member in bucket.members])
    joined.args = (tensors, args_of(joined)[1], *rest)
    joined.meta = {key: joined.meta[key] for key in ("why", "named") if key in joined.meta} | {
        "type": tuple(types),
        "provenance": replace(provenance(joined), module=module),
    }
    for member in others:
        graph.fx.erase_node(member)


def _common_path(paths: list[str]) -> str:
    """The module that has all of these: "blocks.0" of "blocks.0.attention.q" and "blocks.0.mlp"."""
    parts = [path.split(".") for path in paths]
    same = 0
    while all(len(each) > same and each[same] == parts[0][same] for each in parts):
        same += 1
    return ".".join(parts[0][:same])
