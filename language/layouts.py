"""The forms in which users write layouts: text, a list with one entry for each tensor dim, or DTensor's placements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_origin

import torch

from monarch.compiler.errors import LayoutError, Source
from monarch.compiler.text import parse_layout, parse_type
from monarch.compiler.types import DTYPE_NAMES, DTYPES, Layout, MeshSpec, TensorType

LayoutLike = Layout | str | Sequence[Any]
"""`"[@data, -]"`, `["data", None]`, `[Shard(0), Replicate()]` (one for each *mesh* dim), or a Layout."""

_PLACEMENTS = ("Shard", "Replicate", "Partial", "_StridedShard")


def as_layout(layout: LayoutLike, type: TensorType, mesh: MeshSpec, name: str, source: Source | None = None) -> Layout:
    """The layout that a user means for a tensor, checked against its shape and the mesh. Raises LayoutError."""
    try:
        found = _read(layout, type.ndim, mesh, name)
        type.with_layout(found).check(mesh, name)
    except LayoutError as error:
        if error.source is None and source is not None:
            raise LayoutError(error.message, hint=error.hint, source=source) from None
        raise
    return found


def type_of_shards(
    layout: LayoutLike, shard: TensorType, mesh: MeshSpec, name: str, source: Source | None = None
) -> TensorType:
    """The type of the tensor whose shards, in the layout that a user means, are all like `shard`. Raises
    LayoutError."""
    try:
        found = _read(layout, shard.ndim, mesh, name)
        shape = list(shard.shape)
        for dim, mesh_dims in enumerate(found.shards[: shard.ndim]):
            for mesh_dim in mesh_dims:
                shape[dim] *= mesh.sizes.get(mesh_dim, 1)
        type_ = TensorType(shard.dtype, tuple(shape), found)
        type_.check(mesh, name)
    except LayoutError as error:
        raise LayoutError(error.message, hint=error.hint, source=error.source or source) from None
    return type_


def _read(layout: LayoutLike, ndim: int, mesh: MeshSpec, name: str) -> Layout:
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, str):
        return parse_layout(layout)
    if not isinstance(layout, Iterable):
        raise LayoutError(
            f"the layout of {name} is {layout!r}",
            hint='give a text, "[@data, -]", or a list with a mesh dim\'s name or None for each of its dims: '
            "['data', None].",
        )
    entries = list(layout)
    if entries and all(type(entry).__name__ in _PLACEMENTS for entry in entries):
        return _from_placements(entries, ndim, mesh, name)
    shards: list[tuple[str, ...]] = []
    for entry in entries:
        if entry is None or entry == "-":
            shards.append(())
        elif isinstance(entry, str):
            shards.append((entry.removeprefix("@"),))
        elif isinstance(entry, (tuple, list)) and all(isinstance(part, str) for part in entry):
            shards.append(tuple(part.removeprefix("@") for part in entry))
        else:
            raise LayoutError(
                f"the layout of {name} holds {entry!r}",
                hint="give a mesh dim's name, None, or a tuple of names for each tensor dim: ['data', None].",
            )
    return Layout(tuple(shards))


def _from_placements(placements: list[Any], ndim: int, mesh: MeshSpec, name: str) -> Layout:
    if len(placements) != len(mesh.dims):
        raise LayoutError(
            f"{len(placements)} placements for {name} on a mesh with {len(mesh.dims)} dims",
            hint=f"the mesh is {mesh}: give one placement for each of its dims.",
        )
    found = Layout.replicated(ndim)
    for mesh_dim, placement in zip(mesh.names, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Shard":
            dim = placement.dim + ndim if placement.dim < 0 else placement.dim
            if not 0 <= dim < ndim:
                raise LayoutError(
                    f"cannot shard dim {placement.dim} of {name}: it has {ndim} dims",
                    hint=f"Shard(d) on mesh dim '{mesh_dim}' needs 0 <= d < {ndim}.",
                )
            found = found.place(mesh_dim, dim)
        elif kind == "Partial":
            found = found.place(mesh_dim, placement.reduce_op)
        elif kind == "_StridedShard":
            raise LayoutError(
                f"{name} has a strided shard on mesh dim '{mesh_dim}'",
                hint="say the order of nesting with a layout's text instead: '[@(model,data)]' puts model outside.",
            )
    return found


def from_annotation(annotation: object, names: Mapping[str, Any] | None = None) -> TensorType | None:
    """The tensor type that a parameter's annotation spells, or None where it is something else:

        x: Annotated[torch.Tensor, "f32[64@data, 1024]"]
        x: Batch                                        # Batch = Annotated[torch.Tensor, "f32[64@data, 1024]"]
        x: "f32[64@data, 1024]"

    Under `from __future__ import annotations` annotations arrive as their source text: `names` are the globals in
    which a name is looked up.
    """
    if isinstance(annotation, str):
        return _from_text(annotation, names or {})
    for entry in getattr(annotation, "__metadata__", ()) if get_origin(annotation) is Annotated else ():
        if isinstance(entry, str) and (found := _from_text(entry, {})) is not None:
            return found
    return None


def _from_text(annotation: str, names: Mapping[str, Any]) -> TensorType | None:
    text = annotation.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    head, bracket, _ = text.partition("[")
    if bracket and head.strip() in DTYPES:
        type_ = parse_type(text)
        if type_.padding:
            raise LayoutError(
                f"the annotation {text!r} says how a size is padded",
                hint=f"the compiler does that: write {type_.unpadded}.",
            )
        return type_
    if (error := misspelt(text)) is not None:
        raise error
    try:
        written = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    for entry in annotated_with(written):
        if (found := _from_text(str(entry.value), {})) is not None:
            return found
    alias: Any = None
    if isinstance(written, ast.Name):
        alias = names.get(written.id)
    elif isinstance(written, ast.Attribute) and isinstance(written.value, ast.Name):
        alias = getattr(names.get(written.value.id), written.attr, None)
    return from_annotation(alias) if get_origin(alias) is Annotated else None


def misspelt(text: str) -> LayoutError | None:
    """The error in an annotation that is meant as a tensor type and does not begin as one; None for all others."""
    found = re.match(r"""([\w.]*)\s*[\[(]([^'"\[(]*)""", text)
    if found is None or (found[1] in DTYPES and "[" in found[0]):
        return None
    dtype = getattr(torch, found[1].removeprefix("torch."), None)
    name = found[1] if found[1] in DTYPES else DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if name is None and "@" not in found[2] and not re.fullmatch(r"(bf|f|i|u|c)\d+", found[1]):
        return None
    return LayoutError(
        f"'{text}' is no tensor type",
        hint=f'write {name}[...] in its place: "{name}[64@data, 1024]".'
        if name
        else f'a tensor type begins with one of {", ".join(DTYPES)}: "f32[64@data, 1024]".',
    )


def annotated_with(annotation: ast.expr) -> Iterator[ast.Constant]:
    """The texts in `Annotated[..., "text"]`."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        if ast.unparse(annotation.value).rpartition(".")[2] == "Annotated":
            for entry in annotation.slice.elts[1:]:
                if isinstance(entry, ast.Constant) and isinstance(entry.value, str):
                    yield entry
