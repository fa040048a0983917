"""Start collectives before their results are needed, so that a GPU computes while they are on their way."""

from __future__ import annotations

import operator

from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.ops.schema import is_view
from monarch.compiler.passes.collectives import first_use
from monarch.compiler.schedule.buffers import peak_of


class OverlapCollectives(Pass):
    """Start each collective as soon as its operands are computed, and wait for it where its first result is read.

        %g = aten.mm(%t, %d)
        %e = aten.mm(%d, %w)                   # needs nothing of the sum
        %r = all_reduce([%g], ["data"], "sum")
        %s = getitem(%r, 0)
        %n = aten.sub(%v, %s)
        -->
        %g = aten.mm(%t, %d)
        %r = all_reduce([%g], ["data"], "sum")
        %e = aten.mm(%d, %w)
        %wait = wait(%r, [%g])
        %s = getitem(%wait, 0)
        %n = aten.sub(%v, %s)

    A wait reads what its collective moves, so that until then nothing is written over it or freed. The order is one for
    all workers, for they have one graph. A gather of state starts no earlier than the wait for the one before it: while
    a layer computes the next one's parameters come, and no more than two are whole at a time. What moves another
    collective's result stays where it is.

    Under a memory limit that a worker would exceed so, each wait stands right behind its collective instead. The costs
    get "peak_bytes", the most that a worker then holds.
    """

    name = "overlap-collectives"

    def run(self, graph: Graph, context: Context) -> Graph:
        limit = context.options.memory_limit
        if limit is None:
            return _apart(_split(graph))
        made = _apart(_split(graph.copy()))
        peak = peak_of(made)
        if peak > limit:
            made = _split(graph)
            peak = peak_of(made)
        context.costs["peak_bytes"] = peak
        return made


def _split(graph: Graph) -> Graph:
    """Each collective, and right behind it the wait for it."""
    for node in list(graph.calls):
        if not ops.is_collective(node.target) or any(user.target is ops.wait for user in node.users):
            continue
        with graph.fx.inserting_after(node):
            wait = graph.call(
                ops.wait, node, list(args_of(node)[0]), type=node.meta["type"], provenance=provenance(node)
            )
        for user in list(node.users):
            if user is not wait:
                user.replace_input_with(node, wait)
    return graph


def _apart(graph: Graph) -> Graph:
    """Collectives as early, and the waits for them as late, as they can be."""
    at: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.fx.nodes)}
    first_call = next((i for node, i in at.items() if node.op != "placeholder"), 0)
    gathered = -1.0  # where the last gather of state was waited for
    for node in list(graph.calls):
        if not ops.is_collective(node.target):
            continue
        wait = next(user for user in node.users if user.target is ops.wait)
        tensors = args_of(node)[0]
        state = all(tensor.op == "placeholder" and tensor.meta["kind"] == "state" for tensor in tensors)
        if not any(_is_waited_for(tensor) for tensor in tensors):
            ready = max(first_call - 1, *(_made(tensor, at) for tensor in tensors))
            at[node] = min(at[node], max(ready, gathered if state else -1.0) + 0.25)
            for tensor in tensors:
                at[tensor] = min(at[tensor], at[node])
        needed = min((first_use(result, at) for result in wait.users), default=at[wait])
        at[wait] = max(at[node], needed - 0.5)
        for result in wait.users:
            _put(result, at[wait], at)
        if state:
            gathered = at[wait]
    graph.reorder(at)
    return graph


def _is_waited_for(value: fx.Node) -> bool:
    producer = args_of(value)[0] if value.target is operator.getitem else None
    return isinstance(producer, fx.Node) and producer.target is ops.wait


def _made(value: fx.Node, at: dict[fx.Node, float]) -> float:
    """The position at which a value is computed: one of several results as soon as all of them are."""
    return at[args_of(value)[0]] if value.target is operator.getitem else at[value]


def _put(value: fx.Node, position: float, at: dict[fx.Node, float]) -> None:
    """A value, and all views of it, right behind its wait."""
    at[value] = position
    for user in value.users:
        if is_view(user.target):
            _put(user, position, at)
