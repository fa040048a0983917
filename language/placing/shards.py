"""Distributed tensors of actors' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from monarch.compiler.errors import LayoutError, ProgramError, Source
from monarch.compiler.execution.executor import Returned
from monarch.compiler.types import MeshSpec, TensorType
from monarch.language.layouts import LayoutLike, type_of_shards
from monarch.language.recorder.recording import current_program
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import make_fake
from monarch.language.tensors.tensor import DistributedTensor, Ref


def from_shards(mesh: Mesh, shards: Returned, layout: LayoutLike | tuple[LayoutLike, ...]) -> Any:
    """See `Mesh.from_shards`."""
    source = user_source()
    if current_program() is not None:
        raise ProgramError(
            "from_shards() inside a program: its data would be built into the program",
            hint="make the tensor before the program runs, and pass it as an argument.",
            source=source,
        )
    if not hasattr(shards, "adopt"):  # a call's Future, or its ValueMesh: the data has come here
        raise LayoutError(
            f"from_shards() takes the results that .shards(…) keeps at the actors, and this is a "
            f"{type(shards).__name__}",
            hint="ask for it with .shards(...) in place of .call(...): mesh.from_shards(actors.f.shards(), layout).\n"
            "What is here already goes to the workers so: monarch.distribute(tensor, mesh, layout).",
            source=source,
        )
    found = alike(mesh, shards, source)
    local, tree = pytree.tree_flatten(found)
    layouts = layout if isinstance(layout, tuple) else (layout,) * len(local)
    if len(layouts) != len(local):
        raise LayoutError(
            f"{len(layouts)} layouts for {len(local)} tensors",
            hint=f"the actors returned {text(found)}: give one layout for each, or one for all.",
            source=source,
        )
    types = [
        type_of_shards(chosen, type_, mesh.spec, f"returned tensor {at}", source)
        for at, (type_, chosen) in enumerate(zip(local, layouts, strict=True))
    ]
    return pytree.tree_unflatten(adopted(mesh, shards, types), tree)


def adopted(mesh: Mesh, shards: Returned, types: Sequence[TensorType]) -> list[DistributedTensor]:
    """The results of actors, as tensors of these types."""
    made = []
    for type_, handle in zip(types, shards.adopt(mesh.executor, types), strict=True):
        fake = make_fake(type_.shape, type_.dtype)
        made.append(DistributedTensor(fake, Ref(Cell(mesh, type_, handle), fake)))
    return made


def alike(mesh: Mesh, shards: Returned, source: Source | None) -> Any:
    """The result of each actor, with the type of its shard in the place of each tensor; waits for them."""
    found = shards.found(mesh.executor)
    _check_alike(mesh.spec, found, source)
    return found[0]


def _check_alike(mesh: MeshSpec, found: list[Any], source: Source | None) -> None:
    """All workers have to have the same, the keys of dicts in the same order too: tensors are adopted in that."""
    places = [", ".join(f"{name}={at}" for name, at in point.items()) for point in mesh.coordinates()]
    for place, value in zip(places, found, strict=True):
        if pytree.tree_flatten(value) != pytree.tree_flatten(found[0]):
            raise LayoutError(
                f"the shards differ: {text(found[0])} was returned at {places[0]}, and {text(value)} at {place}",
                hint="shards are equal blocks: have every actor return tensors of the same shapes and dtypes, nested "
                "alike,\nwith the keys of dicts in the same order.",
                source=source,
            )


class _Shown:
    """A type in the text of the nest that has it."""

    def __init__(self, type_: object) -> None:
        self._type = type_

    def __repr__(self) -> str:
        return str(self._type)


def text(value: Any) -> str:
    """A nest of types, as users read it."""
    return repr(pytree.tree_map(_Shown, value))


__all__ = ["adopted", "alike", "from_shards", "text"]
