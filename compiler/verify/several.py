"""Whether a graph of several meshes is well formed, whose parts are graphs of one."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import LayoutError
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.passes.cut import cut
from monarch.compiler.text import parse_layout, print_type
from monarch.compiler.types import TensorType
from monarch.compiler.verify.check import Check, is_tensor


class Parts(Check):
    """A graph of several meshes, whose parts are verified as graphs of one."""

    def verify(self, verify: Callable[[Graph], None]) -> None:
        """Check what crosses meshes, and each part by `verify`."""
        graph = self.graph
        for node in graph.fx.nodes:
            if node.op == "output":
                self.output(node)
            elif node.op == "placeholder":
                if node.meta.get("kind") == "state" and "mesh" not in node.meta:
                    self.fail("is a state, and on no mesh", node)
            elif node.target is ops.transfer:
                self.transfer(node)
            else:
                where = {each.meta["mesh"] for each in node.all_input_nodes if "mesh" in each.meta}
                if len(where) > 1:
                    self.fail(f"has operands on several meshes: {', '.join(sorted(where))}", node)
                if where != {node.meta[key] for key in ("mesh",) if key in node.meta}:
                    self.fail(f"is computed on {', '.join(where) or 'any mesh'}, and its type says otherwise", node)
        if not graph.fragments:
            graph = cut(graph.copy())
        for fragment in graph.fragments.values():
            verify(fragment)

    def transfer(self, node: fx.Node) -> None:
        if len(node.args) != 3 or node.kwargs or not is_tensor(node.args[0]):
            self.fail("has to give transfer just tensor, mesh, layout", node)
        value, mesh, layout = args_of(node)
        if mesh not in self.graph.parts or node.meta.get("mesh") != mesh:
            self.fail(f"brings its operand to {mesh!r}, which is not the mesh that it is on", node)
        if value.meta.get("mesh") == mesh:
            self.fail(f"brings to {mesh!r} what is there", node)
        type_ = node.meta.get("type")
        if not isinstance(type_, TensorType) or (type_.dtype, type_.shape) != (
            value.meta["type"].dtype,
            value.meta["type"].shape,
        ):
            self.fail(f"gives {print_type(type_)} of %{value.name}, which is {value.meta['type']}", node)
        if layout is not None:
            try:
                TensorType(type_.dtype, type_.shape, parse_layout(layout)).check(self.graph.mesh_of(node))
            except LayoutError as error:
                self.fail(f"asks for what cannot be: {error.message}", node, error.hint)

    def output(self, node: fx.Node) -> None:
        homes = {p.meta["label"]: p.meta.get("mesh") for p in self.graph.placeholders if p.meta.get("kind") == "state"}
        for value in self.graph.returns:
            if value is not None and "mesh" not in value.meta:
                self.fail(f"returns %{value.name}, which is on no mesh", node)
        for label, value in self.graph.updates.items():
            if "mesh" not in value.meta or homes.get(label, value.meta["mesh"]) != value.meta["mesh"]:
                self.fail(f"updates state '{label}' with %{value.name}, which is on another mesh", node)
