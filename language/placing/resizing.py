"""A mesh gets another size: the tensors on it are partitioned anew, and programs on it are, when they are next called.

A started mesh keeps its workers; a smaller mesh is one on some of them. The mesh stays the same object, and so do the
handles of all values on it, which stand for the resharded ones afterwards: models, optimizers and programs go on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.executor import Handle, Resizable
from monarch.compiler.mesh import Shape
from monarch.compiler.types import Layout, TensorType
from monarch.language.placing.replacing import from_handle, laid_out
from monarch.language.recorder.recording import current_program, outside_programs, turns
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh

logger = logging.getLogger("monarch")


def resize_mesh(mesh: Mesh, **sizes: int) -> Mesh:
    """Give mesh dims of a mesh that has lost nobody other sizes, up to those that it was made with:

        mesh = Mesh(data=4)
        monarch.resize_mesh(mesh, data=3)     # worker 3 holds and runs nothing from now on
        monarch.resize_mesh(mesh, data=4)     # and takes part again

    Gives the same mesh. All tensors on it keep their values and layouts, and move from worker to worker; until all have
    arrived, workers hold both the old blocks and the new ones. Programs are partitioned anew when they are next called;
    the plans for each shape are kept. Parts of the mesh that were made before stay on their workers.

    Workers that it grows by and that share a host with others start on hosts that have joined (`HostMesh.join`), as far
    as there are such. Where one does not take them they stay, and that is logged.

    The first workers along each dim are taken. Raises MonarchError for a dim that the mesh does not have and for a size
    that it was not made with, also while it is traced, and for a value that each worker has its own of along such a
    dim.
    """
    reshape(mesh, sized(mesh, sizes))
    return mesh


def sized(mesh: Mesh, sizes: Mapping[str, int]) -> Shape:
    """The first workers along each dim of those that a mesh was made with: so many as `sizes` say, and of other dims as
    many as it has now. Raises MonarchError where it was not made with so many."""
    shape = mesh._workers.shape
    made = shape.extent
    for name, size in {**mesh.spec.sizes, **sizes}.items():
        made.position(name)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= made[name]:
            raise MonarchError(
                f"{mesh!r} cannot have {size!r} workers along '{name}': it was made with {made[name]}",
                hint=f"give a size from 1 to {made[name]}.",
                source=user_source(),
            )
        shape = shape.select(name, slice(0, size))
    return shape


def reshape(mesh: Mesh, shape: Shape) -> None:
    """Have a mesh that was made consist of these of its workers, with dims of the same names. Raises DeviceMeshError,
    and has changed nothing, where a worker dies meanwhile."""
    if mesh._of is not None:
        raise MonarchError(
            f"{mesh!r} is a part of {mesh._root!r}, and cannot be resized",
            hint="resize the whole mesh.",
            source=user_source(),
        )
    if current_program() is not None:
        raise MonarchError("a mesh cannot be resized inside a program", source=user_source())
    executor = mesh.executor
    if not isinstance(executor, Resizable):
        if shape == mesh._shape:
            return
        raise MonarchError(f"{mesh!r} cannot be resized: it has no workers", source=user_source())
    if executor.take_hosts(shape):
        mesh.heal()
    if shape == mesh._shape:
        return
    with turns, outside_programs(), torch.no_grad():
        here, there = mesh._like(mesh._shape), mesh._like(shape)
        sizes = mesh.spec.sizes
        changed = [name for name, size in there.spec.sizes.items() if size != sizes[name]]
        handles = executor.live()
        _refuse_varying(mesh, handles, changed)
        placed = {id(handle) for handle in handles if executor.placed(handle)}
        kept = [each for each in handles if id(each) not in placed and not _names(each.type.layout, changed)]
        executor.spread(kept, shape)
        pairs = [(handle, handle) for handle in kept]
        for handle in handles:
            if id(handle) in placed:  # so that it can be placed again after a death
                whole = from_handle(here, handle.type, handle).full_tensor()
                pairs.append((handle, there.executor.put(whole, handle.type)))
            elif _names(handle.type.layout, changed):
                pairs.append((handle, _resharded(handle, changed, here, there, shape, executor)))
        executor.move(pairs, shape, lambda: mesh._become(shape))
    logger.info("%r: %d values, %d of them partitioned again", mesh, len(handles), len(handles) - len(kept))


def _names(layout: Layout, dims: Collection[str]) -> bool:
    """Whether workers along one of the mesh dims hold different parts of a value."""
    return not set(layout.mesh_dims).isdisjoint(dims)


def _resharded(
    handle: Handle, changed: Collection[str], here: Mesh, there: Mesh, shape: Shape, executor: Resizable
) -> Handle:
    """A value in its layout on another mesh: gathered along the dims that change, carried over, and cut anew."""
    layout = handle.type.layout
    gathered = layout.only([name for name in layout.mesh_dims if name not in changed])
    whole = laid_out(here, handle, gathered)
    executor.spread([whole], shape)
    executor.carry(whole, shape, whole.type)
    # A sum that was pending has been added up.
    return laid_out(there, whole, Layout(layout.shards, gathered.partial, layout.varying))


def _refuse_varying(mesh: Mesh, handles: Collection[Handle], changed: Collection[str]) -> None:
    own: TensorType | None = next((each.type for each in handles if set(each.type.layout.varying) & set(changed)), None)
    if own is not None:
        raise MonarchError(
            f"{mesh!r} cannot be resized along {', '.join(changed)}: {own} has a value of each worker's own",
            hint="reduce or gather it (monarch.reduce), or drop it, before.",
            source=user_source(),
        )
