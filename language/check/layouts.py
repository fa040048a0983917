"""Layouts and tensor types that stand in a file as text: whether they parse, and fit the file's meshes and tensors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import torch

from monarch.compiler.errors import LayoutError
from monarch.compiler.text import parse_layout, parse_type
from monarch.compiler.types import DTYPES, Layout, MeshSpec, TensorType
from monarch.language.check.names import Names, is_monarch
from monarch.language.check.programs import ProgramDef
from monarch.language.check.report import Reporter
from monarch.language.check.scopes import Function, Scope, parameters
from monarch.language.layouts import annotated_with, misspelt

_QUOTES = re.compile(r"[rRuU]?(\"\"\"|'''|\"|')")
_SHAPED = {"torch.randn", "torch.rand", "torch.zeros", "torch.ones", "torch.empty"}


class Layouts:
    """Checks the layouts of one file."""

    def __init__(self, names: Names, reporter: Reporter, programs: Sequence[ProgramDef]) -> None:
        self.names = names
        self.report = reporter
        self.programs = programs
        self.meshes = self._meshes()

    def check(self) -> None:
        for program in self.programs:
            self.annotations(program)
        for call, scope in self.names.file.calls:
            self.call(call, scope)

    def _meshes(self) -> list[MeshSpec] | None:
        """Every mesh of the file; None where one of them is not written out, or other dims are made from one."""
        found: list[MeshSpec] = []
        for call, scope in self.names.file.calls:
            if self.names.is_mesh_call(call, scope):
                mesh = self.names.mesh(call, scope)
                if mesh is None:
                    return None
                found.append(mesh)
            elif (
                self.names.is_mesh_view(call)
                and any(keyword.arg is not None for keyword in call.keywords)
                and self._may_be_mesh(call, scope)
            ):
                return None
        for function in self.names.file.functions.values():
            for parameter in parameters(function.node.args):
                annotation = ast.unparse(parameter.annotation) if parameter.annotation is not None else ""
                if "mesh" in parameter.arg.lower() or "Mesh" in annotation:
                    return None  # a mesh may come from elsewhere
        return found or None

    def _may_be_mesh(self, call: ast.Call, scope: Scope) -> bool:
        assert isinstance(call.func, ast.Attribute)
        return self.names.mesh_of(call.func.value, scope) is not None or "mesh" in ast.unparse(call.func.value).lower()

    # -- annotations ---------------------------------------------------------------------------------------------

    def annotations(self, program: ProgramDef) -> None:
        """The parameters' tensor types of a program."""
        function = program.function
        if isinstance(function.node, ast.Lambda):
            return
        meshes = self.meshes
        if program.mesh is not None:
            known = self.names.mesh_of(program.mesh, program.scope)
            meshes = [known] if known is not None else None
        for parameter in parameters(function.node.args):
            if parameter.annotation is not None:
                annotation = self.names.alias(parameter.annotation, function.scope)
                self.annotation(annotation, parameter.arg, function, meshes)

    def annotation(
        self, annotation: ast.expr, name: str, function: Function, meshes: Sequence[MeshSpec] | None
    ) -> None:
        annotation = next(annotated_with(annotation), annotation)
        text = self._type_text(annotation)
        if text is None:
            return
        try:
            type_ = parse_type(text)
        except LayoutError:
            self._unreadable(annotation, text, "M201", f"the annotation of '{name}'")
            return
        self._fits(type_, meshes, annotation, f"'{name}'")

    def _type_text(self, annotation: ast.expr) -> str | None:
        """The text of an annotation that is meant as a tensor type, as the language takes it."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            text = annotation.value.strip()
            if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
                text = text[1:-1].strip()
        elif isinstance(annotation, ast.Subscript):
            text = ast.unparse(annotation)
        else:
            return None
        head, bracket, _ = text.partition("[")
        if bracket and head.strip() in DTYPES:
            return text
        if (error := misspelt(text)) is not None:
            self.report.add("M201", annotation, error.message, error.hint)
        return None

    def _fits(self, type_: TensorType, meshes: Sequence[MeshSpec] | None, node: ast.expr, name: str) -> None:
        """Report a type that none of the meshes can have, in the words of the nearest one's error."""
        errors: list[tuple[int, LayoutError]] = []
        for mesh in meshes or ():
            try:
                type_.check(mesh, name)
                return
            except LayoutError as error:
                unknown = sum(dim not in mesh.sizes for dim in type_.layout.mesh_dims)
                errors.append((unknown, error))
        if errors:
            unknown, nearest = min(errors, key=lambda pair: pair[0])
            self.report.add("M203" if unknown else "M204", node, nearest.message, nearest.hint)

    # -- layouts -------------------------------------------------------------------------------------------------

    def call(self, call: ast.Call, scope: Scope) -> None:
        dotted = self.names.file.dotted(call.func, scope)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if is_monarch(dotted, "distribute"):
            layout = keywords.get("layout", call.args[2] if len(call.args) > 2 else None)
            mesh = keywords.get("mesh", call.args[1] if len(call.args) > 1 else None)
            tensor = keywords.get("tensor", call.args[0] if call.args else None)
            for expression in (layout, keywords.get("sharding_spec")):
                if expression is not None:
                    self.layout(expression, self._mesh_list(mesh, scope), self._shape(tensor, scope))
        elif is_monarch(dotted, "layout"):
            layout = keywords.get("layout", call.args[1] if len(call.args) > 1 else None)
            if layout is not None:
                self.layout(layout, self.meshes, None)
        elif is_monarch(dotted, "module_to_mesh"):
            mesh = keywords.get("mesh", call.args[1] if len(call.args) > 1 else None)
            layouts = keywords.get("layouts", call.args[2] if len(call.args) > 2 else None)
            for expression in self._entries(layouts, scope):
                self.layout(expression, self._mesh_list(mesh, scope), None)
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "redistribute" and len(call.args) == 1:
            if isinstance(call.args[0], ast.Constant):
                self.layout(call.args[0], self.meshes, None)

    def _mesh_list(self, mesh: ast.expr | None, scope: Scope) -> list[MeshSpec] | None:
        known = self.names.mesh_of(mesh, scope) if mesh is not None else None
        return [known] if known is not None else None

    def _entries(self, layouts: ast.expr | None, scope: Scope) -> Iterator[ast.expr]:
        """The layouts in module_to_mesh's mapping, where it is written out."""
        if isinstance(layouts, ast.Name) and (home := scope.home(layouts.id)) is not None:
            bindings = home.bindings[layouts.id]
            layouts = bindings[0].value if len(bindings) == 1 and not bindings[0].path else None
        if isinstance(layouts, ast.Dict):
            for value in layouts.values:
                if isinstance(value, ast.Dict):
                    yield from value.values
                else:
                    yield value

    def _shape(self, tensor: ast.expr | None, scope: Scope) -> tuple[int, ...] | None:
        """The shape of `torch.randn(512, 1000)` and the like."""
        if not isinstance(tensor, ast.Call) or self.names.file.dotted(tensor.func, scope) not in _SHAPED:
            return None
        sizes = tensor.args
        if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
            sizes = sizes[0].elts
        found = [part.value for part in sizes if isinstance(part, ast.Constant) and type(part.value) is int]
        if not sizes or len(found) != len(sizes) or any(size < 0 or size >= 2**63 for size in found):
            return None
        return tuple(found)

    def layout(self, expression: ast.expr, meshes: Sequence[MeshSpec] | None, shape: tuple[int, ...] | None) -> None:
        layout = self._read(expression)
        if layout is None:
            return
        if shape is None:
            # Without a shape only the names of the mesh dims can be wrong.
            self._known_dims(layout, meshes, expression)
            return
        if len(shape) != layout.ndim:
            message = f"the layout has {layout.ndim} dims, and the tensor has {len(shape)}"
            self.report.add("M204", expression, message, f"the tensor is {list(shape)}: give one entry for each dim.")
            return
        self._fits(TensorType(torch.float32, shape, layout), meshes, expression, "the tensor")

    def _read(self, expression: ast.expr) -> Layout | None:
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            try:
                return parse_layout(expression.value)
            except LayoutError:
                self._unreadable(expression, expression.value.strip(), "M202", "the layout")
                return None
        if isinstance(expression, ast.List):
            shards: list[tuple[str, ...]] = []
            for entry in expression.elts:
                try:
                    value = ast.literal_eval(entry)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return None
                if value is None or value == "-":
                    shards.append(())
                elif isinstance(value, str):
                    shards.append((value.removeprefix("@"),))
                elif isinstance(value, tuple | list) and all(isinstance(part, str) for part in value):
                    shards.append(tuple(part.removeprefix("@") for part in value))
                else:
                    return None
            return Layout(tuple(shards))
        return None

    def _known_dims(self, layout: Layout, meshes: Sequence[MeshSpec] | None, node: ast.expr) -> None:
        errors: list[str] = []
        for mesh in meshes or ():
            unknown = [dim for dim in layout.mesh_dims if dim not in mesh.sizes]
            if not unknown:
                return
            errors.append(f"the mesh is {mesh}: its dims are {', '.join(mesh.names) or 'none'}.")
        if errors and meshes:
            missing = next(dim for dim in layout.mesh_dims if dim not in meshes[0].sizes)
            self.report.add("M203", node, f"unknown mesh dim '{missing}' in the layout {layout}", "\n".join(errors))

    # -- where it does not parse ---------------------------------------------------------------------------------

    def _unreadable(self, node: ast.expr, text: str, code: str, what: str) -> None:
        """Report text at the very character that does not fit."""
        read = parse_type if code == "M201" else parse_layout
        try:
            read(text, file=self.report.path)
        except LayoutError as error:
            hint = error.hint or (
                'a tensor type is written "f32[64@data, 1024]".' if code == "M201" else 'a layout is "[@data, -]".'
            )
            message = f"{what} does not parse: {error.message}"
            start = self._start(node, text)
            if error.source is None or error.source.line != 1 or start is None:
                self.report.add(code, node, message, hint)
                return
            column = start + error.source.column - 1
            self.report.at(code, node.lineno, column, column + 1, message, hint, node.end_lineno)

    def _start(self, node: ast.expr, text: str) -> int | None:
        """The column at which a text begins in its line; None where it does not stand there as it is."""
        if node.end_lineno != node.lineno:
            return None
        line = self.report.lines[node.lineno - 1]
        first = self.report.column(node.lineno, node.col_offset) - 1
        last = self.report.column(node.lineno, node.end_col_offset or 0) - 1
        written = line[first:last]
        quote = _QUOTES.match(written)
        place = written.find(text, quote.end() if quote and isinstance(node, ast.Constant) else 0)
        return first + place + 1 if place >= 0 else None
