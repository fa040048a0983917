"""Giving tensors on a mesh values that its workers have made otherwise, as those of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monarch.compiler.execution.executor import Handle
from monarch.compiler.types import TensorType
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import make_fake
from monarch.language.tensors.tensor import Cell, DistributedTensor, Ref


def from_handle(mesh: Mesh, type: TensorType, handle: Handle) -> DistributedTensor:
    """A leaf whose value this is."""
    fake = make_fake(type.shape, type.dtype)
    return DistributedTensor(fake, Ref(Cell(mesh, type, handle), fake))


def replace_values(pairs: Sequence[tuple[DistributedTensor, Handle]]) -> None:
    """Give each tensor the value of a handle, which is of its shape and dtype: views write it to where they look. What
    was recorded outside of programs runs before."""
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


__all__ = ["from_handle", "replace_values"]
