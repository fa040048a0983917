"""The pass that partitions a graph over one mesh dim, and the order in which the dims are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.errors import LayoutError
from monarch.compiler.execution.events import say
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.ops.regions import each_region
from monarch.compiler.ops.schema import is_view
from monarch.compiler.partition.choose import choose
from monarch.compiler.partition.decide import decide, decide_alone, mark_keys, pass_on
from monarch.compiler.partition.options import find_options
from monarch.compiler.partition.rewrite import rewrite
from monarch.compiler.partition.whole import announce
from monarch.compiler.text import parse_layout
from monarch.compiler.types import Layout


class PartitionByMesh(Pass):
    """Lay every value out over one mesh dim, and make what moves along it explicit.

    %x = input 0           : f32[64@data, 1024]
    %w = state "w"         : f32[1024, 1024@data]
    %y = aten.mm(%x, %w)   : f32[64, 1024]
    -->
    %x = input 0           : f32[32, 1024] of f32[64@data, 1024]
    %w = state "w"         : f32[1024, 512] of f32[1024, 1024@data]
    %g = all_gather([%w], ["data"], [1])  : (f32[1024, 1024])
    %v = getitem(%g, 0)    : f32[1024, 1024]
    %y = aten.mm(%x, %v)   : f32[32, 1024] of f32[64@data, 1024]

    The regions of ops are partitioned with the op that they belong to.
    """

    regions = "own"

    def __init__(self, mesh_dim: str) -> None:
        self.mesh_dim = mesh_dim
        self.name = f"partition-by-{mesh_dim}"

    def run(self, graph: Graph, context: Context) -> Graph:
        split_state_views(graph)
        if graph.mesh.sizes[self.mesh_dim] == 1:
            if context.report:
                mark_keys(graph)
                decide_alone(graph, self.mesh_dim)
            each_region(graph, self.alone)
            graph.partitioned = (*graph.partitioned, self.mesh_dim)
        else:
            graph = self.partition(graph, context.report)
        if len(graph.partitioned) == len(graph.mesh.dims):
            self.finish(graph, context)
        return graph

    def alone(self, region: Graph) -> Graph:
        """A region over a mesh dim with one worker."""
        each_region(region, self.alone)
        region.partitioned = (*region.partitioned, self.mesh_dim)
        return region

    def finish(self, graph: Graph, context: Context) -> None:
        drop_constraints(graph)
        if whole := announce(graph, context.options.strict):
            context.costs["whole"] = whole + context.costs.get("whole", 0)
        for region in graph.regions.values():
            self.finish(region, context)

    def partition(self, graph: Graph, report: bool = False) -> Graph:
        options = find_options(graph, self.mesh_dim, self.partition)
        choice = choose(options, extra=report)
        if report:
            decide(options, choice)
        if not choice.exact:
            say("passes", f"{self.name}: too many alternatives for an exact choice: near the best")
        return rewrite(options, choice)


def drop_constraints(graph: Graph) -> None:
    """Take out what `layout()` left, once every dim has the layout that it says."""
    for node in list(graph.calls):
        if node.target is ops.constrain:
            value = args_of(node)[0]
            pass_on(node, value)
            node.replace_all_uses_with(value)
            graph.fx.erase_node(node)


def split_state_views(graph: Graph) -> None:
    """Give the backward pass its own copies of views of state, so that a gather of the forward pass is not kept for
    it."""
    for node in reversed(list(graph.calls)):
        if provenance(node).backward or not _views_state(node):
            continue
        later = [user for user in node.users if provenance(user).backward]
        if not later or len(later) == len(node.users):
            continue
        with graph.fx.inserting_before(min(later)):
            copy = graph.fx.node_copy(node)
        copy.meta["provenance"] = replace(provenance(copy), backward=True)
        copy.meta.pop("key", None)
        for user in later:
            user.replace_input_with(node, copy)


def _views_state(node: fx.Node) -> bool:
    while node.op == "call_function" and is_view(node.target):
        node = args_of(node)[0]
    return node.op == "placeholder" and node.meta["kind"] == "state"


def nesting_order(graph: Graph) -> tuple[str, ...]:
    """The order in which to partition the mesh dims: where two shard one tensor dim, the major one first.

    Raises LayoutError where two of the user's layouts nest the same mesh dims in opposite orders.
    """
    after: dict[str, dict[str, tuple[str, Layout]]] = {name: {} for name in graph.mesh.names}
    for name, layout in _user_layouts(graph):
        for names in layout.shards:
            for i, major in enumerate(names):
                for minor in names[i + 1 :]:
                    after[minor].setdefault(major, (name, layout))
    order: list[str] = []
    waiting = list(graph.mesh.names)
    while waiting:
        ready = next((dim for dim in waiting if not set(after[dim]) & set(waiting)), None)
        if ready is None:
            raise _cycle(after, waiting)
        order.append(ready)
        waiting.remove(ready)
    return tuple(order)


def _user_layouts(graph: Graph) -> Iterator[tuple[str, Layout]]:
    for region in graph.regions.values():
        yield from _user_layouts(region)
    for node in graph.placeholders:
        yield f"{node.meta['kind']} {node.meta['label']!r}", node.meta["type"].layout
    for node in graph.calls:
        if node.target is ops.constrain:
            said = "the layouts found" if node.meta.get("found") else f"layout() at {provenance(node).source}"
            yield said, parse_layout(args_of(node)[1])


def _cycle(after: dict[str, dict[str, tuple[str, Layout]]], waiting: list[str]) -> LayoutError:
    minor = waiting[0]
    major, (name, layout) = next((m, at) for m, at in after[minor].items() if m in waiting)
    other, against = next(iter(after[major].values()), (name, layout))
    return LayoutError(
        f"two layouts nest the mesh dims '{major}' and '{minor}' in opposite orders",
        hint=(
            f"{name} is {layout}, and {other} is {against}.\n"
            "In one program a mesh dim nests inside another the same way everywhere: write both in the same order."
        ),
    )
