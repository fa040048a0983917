"""Giving tensors on a mesh values that its workers have made otherwise, as those of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monarch.compiler.execution.executor import Handle, Resizable
from monarch.compiler.types import Layout, TensorType
from monarch.language.recorder.constrain import constrain
from monarch.language.recorder.recording import outside_programs
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import make_fake
from monarch.language.tensors.tensor import DistributedTensor, Ref


def from_handle(mesh: Mesh, type: TensorType, handle: Handle) -> DistributedTensor:
    """A leaf whose value this is."""
    fake = make_fake(type.shape, type.dtype)
    return DistributedTensor(fake, Ref(Cell(mesh, type, handle), fake))


def replace_values(pairs: Sequence[tuple[DistributedTensor, Handle]]) -> None:
    """Give each tensor the value of a handle, which is of its shape and dtype: views write it to their part of the
    base. Ops recorded outside of programs run before."""
    for mesh in {id(tensor.mesh): tensor.mesh for tensor, _ in pairs}.values():
        mesh.flush()
        mesh.settle()
    for tensor, handle in pairs:
        ref = tensor._ref
        if ref.parent is None and ref.cell.placed and ref.cell.type == handle.type:
            ref.cell.set(handle)
        else:
            with torch.no_grad():
                tensor.copy_(from_handle(tensor.mesh, handle.type, handle))


def laid_out(mesh: Mesh, handle: Handle, layout: Layout) -> Handle:
    """The value in another layout: a new one."""
    tensor = constrain(from_handle(mesh, handle.type, handle), layout)
    mesh.flush()
    made = tensor._ref.cell.handle
    assert made is not None
    found = made.type.layout
    if found != layout:  # along a dim of one worker all layouts are one
        executor = mesh.executor
        assert isinstance(executor, Resizable)
        assert all(
            mesh.spec.sizes[name] == 1 or found.placement(name) == layout.placement(name) for name in mesh.spec.names
        )
        executor.carry(made, mesh._shape, made.type.with_layout(layout))
    return made


def reshard(cells: Sequence[tuple[Cell, Layout]]) -> None:
    """Give values on the workers other layouts, one after the other: no worker holds more than one of them twice. Waits
    for each, for only then can its former blocks be freed. Where a worker dies, those not done yet are as before."""
    with outside_programs(), torch.no_grad():
        for cell, layout in cells:
            assert cell.handle is not None
            made = laid_out(cell.mesh, cell.handle, layout)
            cell.mesh.executor.wait(made)
            cell.set(made)


__all__ = ["from_handle", "laid_out", "replace_values", "reshard"]
