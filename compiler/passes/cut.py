"""A graph of several meshes, cut into a graph for each: its calls, its sends, and its receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import GraphError
from monarch.compiler.graph import Graph, Provenance, args_of, provenance, spec_of, tensor_type
from monarch.compiler.types import Layout, MeshSpec, TensorType


def place_values(graph: Graph) -> None:
    """Note for each value of a graph of several meshes its mesh: that of its operands, as placeholders and transfers
    have it. Raises GraphError for a call with operands on two."""
    for node in graph.fx.nodes:
        if node.op != "call_function":
            continue
        if node.target is ops.transfer:
            node.meta["mesh"] = args_of(node)[1]
            continue
        found = list(dict.fromkeys(each.meta["mesh"] for each in node.all_input_nodes if "mesh" in each.meta))
        if len(found) > 1:
            raise GraphError(
                f"%{node.name} has operands on {found[0]} and on {found[1]}",
                hint="a value comes to another mesh by a transfer: x.to(mesh).",
                source=provenance(node).source,
            )
        if found:
            node.meta["mesh"] = found[0]


def cut(graph: Graph) -> Graph:
    """Give a graph of several meshes its fragments.

        %h = aten.mm(%x, %w)                : f32[64, 8] on a
        %t = transfer(%h, "b", none)        : f32[64, 8] on b
        %y = aten.mm(%t, %v)                : f32[64, 8] on b
        -->
        %h = aten.mm(%x, %w)                : f32[64, 8]        # in the graph of a
        %s = send(%h, 0)                    : f32[64, 8]

        %t = recv(0, [64, 8], f32)          : f32[64, 8]        # in the graph of b
        %y = aten.mm(%t, %v)                : f32[64, 8]

    Transfers are numbered in the order of the graph; a value goes to a mesh once for each layout in which it is wanted
    there. A value that is on no mesh is computed on each that reads it.
    """
    return _Cut(graph).run()


def sends_of(fragment: Graph) -> dict[int, fx.Node]:
    """The values that a fragment sends, by the transfer's number."""
    return {args_of(node)[1]: args_of(node)[0] for node in fragment.calls if node.target is ops.send}


def receives_of(fragment: Graph) -> dict[int, fx.Node]:
    """The values that a fragment receives, by the transfer's number."""
    return {args_of(node)[0]: node for node in fragment.calls if node.target is ops.recv}


def lay_out_received(fragment: Graph, sent: dict[int, tuple[TensorType, MeshSpec]]) -> None:
    """Give a fragment's received values the layouts in which they are sent, as far as the dims' names and sizes fit,
    where the program asks for no other. A value from a fragment that is not partitioned yet is received as its readers
    take it."""
    for number, node in receives_of(fragment).items():
        if number not in sent or any(user.target is ops.constrain for user in node.users):
            continue
        type_, mesh = sent[number]
        layout = Layout(
            tuple(
                tuple(name for name in names if fragment.mesh.sizes.get(name) == mesh.sizes[name])
                for names in type_.layout.shards
            )
        )
        node.meta["received"] = f"it comes from another mesh, where it is {type_.layout}"
        if not layout.is_replicated:
            _constrained(fragment, node, str(layout))


def _constrained(graph: Graph, node: fx.Node, layout: str) -> fx.Node:
    with graph.fx.inserting_after(node):
        made = graph.call(
            ops.constrain, node, layout, type=node.meta["type"], provenance=provenance(node), name=f"{node.name}_laid"
        )
    if "traced" in node.meta:
        made.meta["traced"] = made.name
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


class _Cut:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.count = 0
        self.known: dict[tuple[fx.Node, str, str | None], fx.Node] = {}
        self.made: dict[str, dict[fx.Node, fx.Node]] = {name: {} for name in graph.parts}
        """For each part, the values that it has, by those of the whole graph."""

    def run(self) -> Graph:
        graph = self.graph
        for name, place in graph.parts.items():
            fragment = Graph(f"{graph.name}.{name}", spec_of(place))
            graph.fragments[name] = fragment
        readers = self.readers()
        for node in graph.fx.nodes:
            if node.target is ops.transfer:
                self.transfer(node)
            elif node.op != "output":
                for name in readers[node]:
                    self.copy(node, name)
        for name, fragment in graph.fragments.items():
            have = self.made[name]
            returned = [node for node in graph.returns if node is not None and node.meta["mesh"] == name]
            updates = {label: node for label, node in graph.updates.items() if node.meta["mesh"] == name}
            fragment.output([have[node] for node in returned], {label: have[node] for label, node in updates.items()})
        return graph

    def readers(self) -> dict[fx.Node, list[str]]:
        """The parts that have each value, in order: one that is on a mesh, or those that compute it."""
        found: dict[fx.Node, set[str]] = {}
        first = next(iter(self.graph.parts))
        for node in reversed(list(self.graph.fx.nodes)):
            if node.op == "output":
                continue
            if "mesh" in node.meta:
                found[node] = {node.meta["mesh"]}
                continue
            found[node] = set().union(*(found.get(user, ()) for user in node.users))
            if ops.acts(node.target) and not found[node]:
                found[node] = {first}
        return {node: [name for name in self.graph.parts if name in found[node]] for node in found}

    def copy(self, node: fx.Node, name: str) -> None:
        fragment, have = self.graph.fragments[name], self.made[name]
        if node.op == "placeholder":
            tensor_type(node).check(fragment.mesh, f"{node.meta['kind']} {node.meta['label']!r}, which {name} reads,")
        made = have[node] = fragment.fx.node_copy(node, lambda each: have[each])
        made.meta.pop("mesh", None)
        if node.op == "placeholder" and node.meta["kind"] == "constant":
            label = str(node.meta["label"])
            fragment.constants[label] = self.graph.constants[label]
        if node.target in ops.WITH_REGIONS:
            self.take_regions(args_of(node)[ops.regions_at(node.target)], self.graph, fragment)

    def take_regions(self, names: Iterable[str], source: Graph, target: Graph) -> None:
        for name in names:
            target.regions[name] = _on(source.regions[name].copy(), target.mesh)

    def transfer(self, node: fx.Node) -> None:
        value, target, layout = args_of(node)
        fragment, have = self.graph.fragments[target], self.made[target]
        line = provenance(node)
        if "mesh" not in value.meta:  # computed there
            have[node] = have[value] if layout is None else self.laid_out(fragment, have[value], layout, line)
            return
        if (value, target, layout) in self.known:
            have[node] = self.known[value, target, layout]
            return
        type_ = tensor_type(value)
        plain = TensorType(type_.dtype, type_.shape)
        source = self.graph.fragments[value.meta["mesh"]]
        sent = self.made[value.meta["mesh"]][value]
        there = replace(line, stage=provenance(value).stage)
        source.call(ops.send, sent, self.count, type=plain, provenance=there, name=f"{node.name}_sent")
        made = fragment.call(
            ops.recv, self.count, list(type_.shape), type_.dtype, type=plain, provenance=line, name=node.name
        )
        if "traced" in node.meta:
            made.meta["traced"] = made.name
        self.count += 1
        if layout is not None:
            made.meta["received"] = f"to() at {line.source} says {layout}" if line.source else f"to() says {layout}"
            made = self.laid_out(fragment, made, layout, line)
        have[node] = self.known[value, target, layout] = made

    def laid_out(self, fragment: Graph, value: fx.Node, layout: str, line: Provenance) -> fx.Node:
        type_ = tensor_type(value).with_layout(Layout.replicated(tensor_type(value).ndim))
        made = fragment.call(ops.constrain, value, layout, type=type_, provenance=line, name=f"{value.name}_laid")
        if "traced" in value.meta:
            made.meta["traced"] = made.name
        return made


def _on(region: Graph, mesh: MeshSpec) -> Graph:
    region.mesh = mesh
    for inner in region.regions.values():
        _on(inner, mesh)
    return region
