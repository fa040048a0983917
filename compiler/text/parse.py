"""Text to meshes, layouts, tensor types and graphs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from lark import Token, Tree
from torch import fx

from monarch.compiler.errors import GraphError, LayoutError
from monarch.compiler.graph import Graph, spec_of
from monarch.compiler.mesh import MeshShapeError, NDSlice, Shape
from monarch.compiler.names import CONSTANTS, UnknownOp, find_op
from monarch.compiler.symbols import symbol
from monarch.compiler.text.comment import parse_comment
from monarch.compiler.text.grammar import Parsed, Text
from monarch.compiler.text.print import following_strides
from monarch.compiler.types import DTYPES, REDUCTIONS, Layout, MeshSpec, TensorType

MAX_DEPTH = 32
"""Of lists among an op's arguments."""


@lru_cache(maxsize=4096)
def parse_type(text: str, *, file: str | None = None) -> TensorType:
    """A tensor type, such as `f32[64@data, 1024] partial<sum: model>`. Raises LayoutError at what does not fit; its
    source names `file`, and the place in the text, where it is given."""
    reader = _Reader(Text(text.strip(), "tensor type", LayoutError, file))
    return reader.type(reader.text.tree("type"))


@lru_cache(maxsize=4096)
def parse_layout(text: str, *, file: str | None = None) -> Layout:
    """A layout: one entry for each tensor dim, such as `[@data, -, @(fsdp,model)] partial<sum: pipe>`.

    `-` or a size leaves a dim whole. Raises LayoutError at what does not fit; its source names `file`, and the place in
    the text, where it is given.
    """
    reader = _Reader(Text(text.strip(), "layout", LayoutError, file))
    tree = reader.text.tree("layout")
    places = [child for child in tree.children if child is not None and child.data == "place"]
    return reader.layout([reader.axes(place.children[-1]) for place in places], tree)


def parse_mesh(text: str) -> MeshSpec:
    """A mesh, such as `mesh<data=4, model=2>`. Raises LayoutError at what does not fit."""
    reader = _Reader(Text(text.strip(), "mesh", LayoutError))
    return reader.mesh(reader.text.tree("mesh"))


def parse_graph(text: str, *, file: str | None = None) -> Graph:
    """A graph, from what `print_graph` gave or from the same written by hand.

    Local shapes of a partitioned graph may be left out. Constants' tensors are not in the text: `constants` is empty.
    Errors name `file` where it is given. Raises GraphError at what does not fit.
    """
    return _GraphReader(Text(text, "graph text", GraphError, file)).graph()


class _Reader:
    """Reads what stands inside types, layouts and meshes."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def int(self, token: Token, what: str = "a size", least: int = 0) -> int:
        if len(token) > 19 or int(token) >= 2**63:
            self.text.fail(token, f"{what} has to be below 2**63")
        if int(token) < least:
            self.text.fail(token, f"{what} has to be at least {least}")
        return int(token)

    def string(self, token: Token) -> str:
        try:
            value: str = json.loads(token, strict=False)
        except ValueError as error:
            self.text.fail(token, f"not a string: {getattr(error, 'msg', error)}")
        return value

    def mesh(self, tree: Parsed) -> MeshSpec:
        sizes: dict[str, int] = {}
        for entry in tree.children:
            if entry is None:
                continue
            name, size = entry.children
            if name in sizes:
                self.text.fail(name, f"mesh dim '{name}' stands twice")
            sizes[str(name)] = self.int(size, "a mesh dim's size", 1)
        return MeshSpec.of(**sizes)

    def axes(self, tree: Parsed) -> list[Token]:
        return tree.children if _is_tree(tree) else []

    def layout(self, shards: Sequence[list[Token]], tree: Parsed) -> Layout:
        """A layout of the mesh dims in `shards`, and the partial<…> and varying<…> of `tree`."""
        partial: list[tuple[str, str]] = []
        varying: list[str] = []
        seen = [name for names in shards for name in names]
        for tail in tree.find_pred(lambda node: node.data in ("partial", "varying")):
            names = tail.children
            if tail.data == "partial":
                reduction, *names = names
                if reduction not in REDUCTIONS:
                    known = ", ".join(REDUCTIONS)
                    self.text.fail(reduction, f"unknown reduction '{reduction}'", f"it is one of {known}.")
                partial += [(str(name), str(reduction)) for name in names]
            else:
                varying += [str(name) for name in names]
            seen += names
        twice = [name for at, name in enumerate(seen) if name in seen[:at]]
        if twice:
            self.text.fail(
                twice[0],
                f"mesh dim '{twice[0]}' stands twice in one layout",
                "a mesh dim can shard one tensor dim, or hold partial values, but not two things at once.",
            )
        return Layout(tuple(tuple(str(name) for name in names) for names in shards), tuple(partial), tuple(varying))

    def type(self, tree: Parsed) -> TensorType:
        dtype, *rest = tree.children
        if dtype not in DTYPES:
            self.text.fail(dtype, f"unknown dtype '{dtype}'", f"it is one of {', '.join(DTYPES)}.")
        sizes = [entry.children for entry in rest if entry is not None and entry.data == "size"]
        layout = self.layout([self.axes(axes) for _, axes in sizes], tree)
        written = [_size_and_padding(size) for size, _ in sizes]
        named = [size.type == "NAME" for size, _ in sizes]
        padding = tuple(0 if pad is None else self.int(pad, "padding", 1) for _, pad in written)
        shape = tuple(
            symbol(str(size)) if is_name else self.int(size) + pad
            for (size, _), pad, is_name in zip(written, padding, named, strict=True)
        )
        return TensorType(DTYPES[dtype], shape, layout, padding)


class _GraphReader(_Reader):
    def __init__(self, text: Text) -> None:
        super().__init__(text)
        self.nodes: dict[str, fx.Node] = {}
        self.lines: dict[str, int] = {}
        self.updates: dict[str, fx.Node] = {}
        self.made = Graph("", MeshSpec(()))

    def graph(self) -> Graph:
        tree = self.text.tree("graph")
        header = {child.data: child for child in tree.children if _is_tree(child)}
        name = header["graph_name"].children[0]
        mesh = self.mesh(header["mesh"])
        partitioned = header["partitioned"].children if "partitioned" in header else []
        for at, dim in enumerate(partitioned):
            if dim not in mesh.sizes or dim in partitioned[:at]:
                what = "stands twice" if dim in mesh.sizes else f"is not a dim of {mesh}"
                self.text.fail(dim, f"'{dim}' in partitioned<…> {what}")
        self.made = graph = Graph(
            self.string(name) if name.type == "STRING" else str(name),
            mesh,
            partitioned=tuple(str(dim) for dim in partitioned),
        )
        if "parts" in header:
            self.parts(graph, header["parts"])
        self.body(graph, tree)
        return graph

    def parts(self, graph: Graph, tree: Parsed) -> None:
        """The meshes of a graph of several, and where their workers are."""
        following = 0
        for part in tree.children:
            name, mesh, offset, *strides = part.children
            if str(name) in graph.parts:
                self.text.fail(name, f"mesh '{name}' stands twice")
            spec = self.mesh(mesh)
            sizes = [size for _, size in spec.dims]
            first = following if offset is None else self.int(offset, "a part's first worker")
            by = [self.int(stride, "a stride", 1) for stride in strides if stride is not None]
            try:
                grid = NDSlice(offset=first, sizes=sizes, strides=by or following_strides(sizes))
            except MeshShapeError as error:
                self.text.fail(name, f"mesh '{name}' cannot be: {error.message}")
            graph.parts[str(name)] = Shape(spec.names, grid)
            following = first + len(grid)

    def body(self, graph: Graph, tree: Parsed) -> None:
        """Fill a graph with the lines of its text, or of that of a region."""
        returned = False
        for line in tree.children:
            if not _is_tree(line) or line.data not in ("value", "update", "return", "region"):
                continue
            if returned:
                self.text.fail(_first(line) or tree.children[-1], "'return' has to be the last line of a graph")
            if line.data == "value":
                if self.updates:
                    self.text.fail(line.children[0], "updates stand after the last value, before 'return'")
                self.value(graph, line)
            elif line.data == "region":
                self.region(graph, line)
            elif line.data == "update":
                self.update(line)
            else:
                graph.output([self.returned(item) for item in line.children if not _is_comment(item)], self.updates)
                returned = True
        if not returned:
            end = self.text.text.count("\n", 0, self.text.text.rindex("}")) + 1
            hint = "end it with 'return %x', or with 'return' alone."
            self.text.fail_at(end, 1, "the graph has no 'return' line", hint)

    def region(self, graph: Graph, line: Parsed) -> None:
        label = line.children[0]
        name = self.string(label)
        if name in graph.regions:
            self.text.fail(label, f"region {label} is defined twice")
        if self.nodes:
            self.text.fail(label, "regions stand before the first value")
        region = graph.regions[name] = Graph(name, graph.mesh, partitioned=graph.partitioned)
        self.body(region, line)
        self.nodes, self.lines, self.updates = {}, {}, {}

    def value(self, graph: Graph, line: Parsed) -> None:
        ref, made, result, on, comment = line.children
        name = ref[1:]
        if name in self.nodes:
            self.text.fail(ref, f"{ref} is defined twice; the first time on line {self.lines[name]}")
        part = None if on is None else on.children[0]
        if part is not None and part not in graph.parts:
            known = f"it is one of {', '.join(graph.parts)}." if graph.parts else "this graph is of one mesh."
            self.text.fail(part, f"unknown mesh '{part}'", known)
        mesh = spec_of(graph.parts[str(part)]) if part is not None else None if graph.parts else graph.mesh
        type_ = self.result(result.children[0], ref, mesh)
        if made.data == "placeholder":
            kind, label = made.children
            if isinstance(type_, tuple | None):
                self.text.fail(ref, f"{ref} is a placeholder: its type is one tensor's")
            node = graph.fx.create_node("placeholder", name, (), {}, name=name)
            label = self.string(label) if label.type == "STRING" else self.int(label, "an input's position")
            node.meta.update(kind=str(kind), label=label)
        else:
            op, *arguments = made.children
            try:
                target = find_op(str(op))
            except UnknownOp as error:
                self.text.fail(op, error.message, error.hint)
            args, kwargs = self.arguments([item for item in arguments if item is not None])
            node = graph.fx.create_node("call_function", target, args, kwargs, name=name)
        # fx renames values that shadow a Python builtin (%sum); names of a graph's text are free of each other already.
        node.name = name
        if type_ is not _UNTYPED:
            node.meta["type"] = type_
        if part is not None:
            node.meta["mesh"] = str(part)
        if comment is not None:
            node.meta.update(parse_comment(comment))
        self.nodes[name] = node
        self.lines[name] = ref.line

    def update(self, line: Parsed) -> None:
        label, ref, _ = line.children
        name = self.string(label)
        if name in self.updates:
            self.text.fail(label, f"state {label} is updated twice")
        self.updates[name] = self.node(ref)

    def returned(self, item: Token) -> fx.Node | None:
        if item.type == "REF":
            return self.node(item)
        if item != "none":
            self.text.fail(item, f"a graph returns %values or none, not '{item}'")
        return None

    def node(self, ref: Token) -> fx.Node:
        node = self.nodes.get(ref[1:])
        if node is None:
            self.text.fail(ref, f"{ref} is not defined above this line")
        return node

    def result(self, tree: Parsed, ref: Token, mesh: MeshSpec | None) -> Any:
        """The type of a value on a mesh (None: on any): one tensor's, a tuple of them, None, or _UNTYPED for `?`."""
        if isinstance(tree, Token):
            if tree.type == "UNKNOWN":
                return _UNTYPED
            if tree != "none":
                self.text.fail(tree, f"'{tree}' is no type: write {tree}[…], with the tensor's sizes, or none")
            return None
        if tree.data == "tuple":
            types = [self.result(child, ref, mesh) for child in tree.children if child is not None]
            if any(type_ is _UNTYPED for type_ in types):
                self.text.fail(ref, "'?' stands for a whole type, not for a part of a tuple")
            return tuple(types)
        first, of = tree.children
        given = self.type(first)
        type_ = given if of is None else self.type(of)
        try:
            if mesh is not None:
                type_.check(mesh, str(ref))
        except LayoutError as error:
            self.text.fail((of or first).children[0], error.message, error.hint)
        if of is not None:
            local = self.made.local_shape(type_)
            if given.layout != Layout.replicated(given.ndim):
                self.text.fail(first.children[0], "what stands before 'of' is one worker's part, which has no layout")
            if given.dtype != type_.dtype or given.shape != local:
                right = TensorType(type_.dtype, local)
                self.text.fail(first.children[0], f"a worker holds {right} of {type_}, not {given}")
        return type_

    def arguments(self, items: Sequence[Parsed]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for item in items:
            if _is_tree(item) and item.data == "keyword":
                name, value = item.children
                if name in kwargs:
                    self.text.fail(name, f"argument '{name}' is given twice")
                kwargs[str(name)] = self.argument(value)
            elif kwargs:
                self.text.fail(_first(item) or items[0], "arguments without a name stand before those with one")
            else:
                args.append(self.argument(item))
        return tuple(args), kwargs

    def argument(self, item: Parsed, depth: int = 0) -> Any:
        if _is_tree(item):
            if item.data == "named":
                return self.named(*item.children)
            if depth >= MAX_DEPTH:
                self.text.fail(item.children[0], f"lists are nested more than {MAX_DEPTH} deep")
            return [self.argument(child, depth + 1) for child in item.children[1:] if child is not None]
        if item.type == "REF":
            return self.node(item)
        if item.type == "STRING":
            return self.string(item)
        if item.type == "FLOAT":
            return float(item)
        if item.type == "INT":
            if len(item) > 40:
                self.text.fail(item, "this number is too large")
            return int(item)
        if item not in CONSTANTS:
            self.text.fail(
                item,
                f"unknown argument '{item}'",
                'write %name for a value, "text" for a string; constants are none, true, false, inf, nan, f32 and the '
                "other dtypes, memory formats, layouts.",
            )
        return CONSTANTS[item]

    def named(self, word: Token, name: Token) -> torch.device | complex:
        """`device("cpu")` or `complex("1+2j")`."""
        if word == "complex":
            try:
                return complex(self.string(name))
            except ValueError:
                self.text.fail(name, f"{name} is no complex number", 'write it as Python does: "(1+2j)".')
        if word != "device":
            self.text.fail(word, f"'{word}' cannot stand before '(' here: nested calls are lines of their own")
        try:
            return torch.device(self.string(name))
        except RuntimeError:
            self.text.fail(name, f"{name} is no device", 'devices are "cpu", "cuda", "cuda:0", "meta" and the like.')


_UNTYPED = object()


def _size_and_padding(token: Token) -> tuple[Token, Token | None]:
    """The two numbers in `62+2`; of `64`, that and None."""
    size, plus, padding = token.partition("+")
    return token.update(value=size), token.update(value=padding) if plus else None


def _first(item: Parsed) -> Parsed:
    """The first token under a tree; None where it has none."""
    while _is_tree(item):
        item = next((child for child in item.children if child is not None), None)
    return item


def _is_comment(item: Parsed) -> bool:
    return item is None or item.type == "COMMENT"


def _is_tree(item: Parsed) -> bool:
    return isinstance(item, Tree)
