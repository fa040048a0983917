"""Plain tensors that come to a mesh with their data."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from monarch.compiler.errors import LayoutError
from monarch.compiler.execution.executor import Handle
from monarch.compiler.execution.factories import abstract_can_run
from monarch.compiler.types import TensorType
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.operations import operations
from monarch.language.tensors.shapes import like
from monarch.language.tensors.tensor import DistributedTensor, Ref


def check_dense(tensor: torch.Tensor) -> None:
    """Raises LayoutError for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise LayoutError(
            f"a tensor of layout {tensor.layout} cannot be on a mesh",
            hint="make it dense first: x.to_dense().",
            source=user_source(),
        )


def check_data(tensor: torch.Tensor, what: str) -> None:
    """Raises LayoutError for a tensor for the workers that has no data."""
    kind = type(tensor)
    if not tensor.is_meta and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or abstract_can_run():
        return
    if tensor.is_meta:
        found, hint = "on the meta device, and has no data", "monarch.distribute makes zeros of it on the mesh."
    elif isinstance(tensor, FakeTensor):
        found, hint = f"a {kind.__name__}, which has no data", "pass a tensor that was made outside of FakeTensorMode."
    else:
        found, hint = f"a {kind.__name__}, whose data only that class knows", "pass a torch.Tensor made of it."
    raise LayoutError(f"{what} is {found}", hint=hint, source=user_source())


def put(tensor: torch.Tensor, mesh: Mesh, type: TensorType) -> DistributedTensor:
    """A leaf on the mesh with the data of a plain tensor, and its requires_grad. On an abstract mesh it has no data.
    Raises LayoutError for a sparse tensor."""
    check_dense(tensor)
    if mesh.is_abstract:
        cell = Cell(mesh, type, placed=True)
    else:
        with operations.plainly():
            cell = Cell(mesh, type, mesh.executor.put(tensor.detach().contiguous(), type))
    fake = like(tensor)
    return DistributedTensor(fake, Ref(cell, fake), requires_grad=tensor.requires_grad)


def of_handle(tensor: torch.Tensor, mesh: Mesh, handle: Handle) -> DistributedTensor:
    """A leaf on the mesh whose data, which is that of a plain tensor, has been placed there."""
    fake = like(tensor)
    return DistributedTensor(fake, Ref(Cell(mesh, handle.type, handle), fake))


LARGE = 2**20
"""Guards look at the content of plain tensors of up to so many bytes, and of others where an op has read them."""


def same_content(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two plain tensors have the same dtype, shape and bits. Versions do not say: `tensor.data`, an array with
    the same memory and another process change a tensor and leave its version."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = [each.detach().resolve_conj().resolve_neg().contiguous().view(-1) for each in (first, second)]
    return not bits[0].numel() or torch.equal(*(each.view(torch.uint8) for each in bits))


_Known = dict[int, tuple[Any, torch.Tensor, DistributedTensor]]
_plain: weakref.WeakKeyDictionary[Mesh, _Known] = weakref.WeakKeyDictionary()


def put_plain(tensor: torch.Tensor, mesh: Mesh) -> DistributedTensor:
    """A plain tensor that meets distributed ones outside a program: replicated, and kept while it lives unchanged, so
    that a mask used in every step travels once."""
    known = _plain.setdefault(mesh, {})
    found = known.get(id(tensor))
    if found is not None and found[0]() is tensor and same_content(found[1], tensor):
        return found[2]
    made = put(tensor.detach(), mesh, TensorType(tensor.dtype, tuple(tensor.shape)))
    key, kept = id(tensor), tensor.detach().clone()
    known[key] = (weakref.ref(tensor, lambda _: known.pop(key, None)), kept, made)
    return made
