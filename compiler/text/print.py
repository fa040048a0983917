"""Graphs to text. What is printed parses back, and prints the same again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from monarch.compiler.display import shows_as
from monarch.compiler.errors import GraphError
from monarch.compiler.graph import Graph, provenance, spec_of
from monarch.compiler.mesh import NDSlice
from monarch.compiler.names import CONSTANT_NAMES, op_name
from monarch.compiler.symbols import same
from monarch.compiler.text.comment import print_comment
from monarch.compiler.types import TensorType

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
CALL_COLUMN, TYPE_COLUMN = 64, 56
"""The widest call and type that others are padded to; longer ones stand out of line."""


def print_graph(graph: Graph, *, paths: bool = False, modules: bool = False) -> str:
    """A graph's text, a line for each value, without a newline at the end.

    `paths` prints source files with their folders, which otherwise are left out; `modules` the modules that ran
    the ops. Behind the cut by meshes these are the texts of the parts, one
    behind the other. Raises GraphError for an argument that has no text.
    """
    if graph.fragments:
        options = {"paths": paths, "modules": modules}
        return "\n\n".join(print_graph(fragment, **options) for fragment in graph.fragments.values())
    types: dict[int, str] = {}
    rows = [
        (*_columns(node, graph, types), print_comment(node.meta, paths=paths, modules=modules))
        for node in _values(graph)
    ]
    call_width = max((len(call) for call, _, _ in rows if len(call) <= CALL_COLUMN), default=0)
    type_width = max((len(type_) for _, type_, comment in rows if len(type_) <= TYPE_COLUMN and comment), default=0)
    lines = [_header(graph), *_regions(graph, paths=paths, modules=modules)]
    for call, type_, comment in rows:
        line = f"  {call:{call_width}} : {type_}"
        lines.append(f"{line:{call_width + type_width + 5}}  {comment}" if comment else line)
    output = next((node for node in graph.fx.nodes if node.op == "output"), None)
    if output is not None:
        for state, node in graph.updates.items():
            lines.append(f"  update {_string(state)} = %{node.name}")
        returns = ", ".join("none" if node is None else f"%{node.name}" for node in graph.returns)
        lines.append(f"  return {returns}".rstrip())
    return "\n".join([*lines, "}"])


def _regions(graph: Graph, **options: bool) -> Iterator[str]:
    """The lines of a graph's regions, which stand before its values."""
    for name, region in graph.regions.items():
        _, *lines = print_graph(region, **options).split("\n")
        yield f"  region {_string(name)} {{"
        yield from (f"  {line}" for line in lines)


def print_node(node: fx.Node, graph: Graph | None = None) -> str:
    """One value's line, as in its graph's text; without `graph`, local shapes are left out."""
    call, type_ = _columns(node, graph, {})
    comment = print_comment(node.meta, paths=False)
    return f"{call} : {type_}" + (f"  {comment}" if comment else "")


def print_type(type_: object, graph: Graph | None = None) -> str:
    """A value's type; `local of global` where its shape in `graph` is not the global one."""
    return _type_text(type_, graph, {})


def _type_text(type_: object, graph: Graph | None, types: dict[int, str]) -> str:
    """The same. `types` are the texts that are known, by the ids of types: equal layers share these."""
    text = types.get(id(type_))
    if text is None:
        text = types[id(type_)] = _print_type(type_, graph, types)
    return text


def _print_type(type_: object, graph: Graph | None, types: dict[int, str]) -> str:
    if type_ is None:
        return "none"
    if isinstance(type_, tuple):
        return f"({', '.join([_type_text(entry, graph, types) for entry in type_])})"
    if not isinstance(type_, TensorType):
        return "?"
    if graph is None or not all(name in graph.mesh.sizes for name in type_.layout.mesh_dims):
        return str(type_)
    local = graph.local_shape(type_)
    return str(type_) if same(local, type_.shape) else f"{TensorType(type_.dtype, local)} of {type_}"


def _header(graph: Graph) -> str:
    name = graph.name if _NAME.fullmatch(graph.name) else _string(graph.name)
    partitioned = f" partitioned<{', '.join(graph.partitioned)}>" if graph.partitioned else ""
    return f"graph @{name} on {graph.mesh}{partitioned}{_parts(graph)} {{"


def _parts(graph: Graph) -> str:
    """` with a: mesh<data=2>, b: mesh<data=2>`: a place is said where a part's workers are not the next ones."""
    texts, following = [], 0
    for name, place in graph.parts.items():
        grid = place.ndslice
        by = f" by ({', '.join(map(str, grid.strides))})" if grid.strides != following_strides(grid.sizes) else ""
        at = f" at {grid.offset}{by}" if by or grid.offset != following else ""
        texts.append(f"{name}: {spec_of(place)}{at}")
        following = grid.offset + len(grid)
    return f" with {', '.join(texts)}" if texts else ""


def following_strides(sizes: Sequence[int]) -> list[int]:
    """The strides of workers that come one behind the other, the last dim fastest."""
    return NDSlice.new_row_major(sizes).strides


def _values(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.fx.nodes if node.op != "output"]


def _columns(node: fx.Node, graph: Graph | None, types: dict[int, str]) -> tuple[str, str]:
    """A value's call and type."""
    meta = node.meta
    on = f" on {meta['mesh']}" if "mesh" in meta else ""
    return f"%{node.name} = {print_call(node)}", _type_text(meta.get("type", "?"), graph, types) + on


def print_call(node: fx.Node) -> str:
    """The right side of a value's line: `aten.mm(%x, %w)`, `state "fc.weight"`."""
    if node.op == "placeholder":
        label = node.meta.get("label", node.name)
        return f"{node.meta.get('kind', 'input')} {label if isinstance(label, int) else _string(str(label))}"
    if node.op == "call_function":
        return _call(node)
    raise GraphError(f"%{node.name} is a '{node.op}' node: a graph has placeholders, calls of ops and an output")


def _call(node: fx.Node) -> str:
    name = op_name(node.target)
    if name is None:
        raise GraphError(
            f"%{node.name} calls {node.target}, which has no text",
            hint="a graph calls OpOverloads (torch.ops.aten.mm.default), getitem and the ops of monarch.compiler.ops.",
        )
    arguments = [_argument(argument, node) for argument in node.args]
    arguments += [f"{key}={_argument(argument, node)}" for key, argument in node.kwargs.items()]
    return f"{name}({', '.join(arguments)})"


def _argument(value: Any, node: fx.Node) -> str:
    match value:
        case fx.Node():
            return f"%{value.name}"
        case list() | tuple():
            return f"[{', '.join(_argument(entry, node) for entry in value)}]"
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)
        case complex():
            return f"complex({_string(str(value))})"
        case str():
            return _string(value)
        case torch.dtype() | torch.memory_format() | torch.layout() if value in CONSTANT_NAMES:
            return CONSTANT_NAMES[value]
        case torch.device():
            return f"device({_string(str(value))})"
    raise GraphError(
        f"an argument of %{node.name} = {op_name(node.target)} has no text: {value!r} ({type(value).__name__})",
        source=provenance(node).source,
    )


def _string(text: str) -> str:
    return _PRINTABLE.encode(text) if text.isprintable() else json.dumps(text)


_PRINTABLE = json.JSONEncoder(ensure_ascii=False)


shows_as(Graph, print_graph)
