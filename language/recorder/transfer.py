"""`x.to(mesh)`: a tensor on another part of the mesh that was made."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.types import Layout, TensorType
from monarch.language.layouts import LayoutLike, as_layout
from monarch.language.recorder.constrain import constrain
from monarch.language.recorder.meshes import apart_error
from monarch.language.recorder.recording import current
from monarch.language.recorder.varying import varying_of
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.operations import operations
from monarch.language.tensors.tensor import DistributedTensor


def transfer(tensor: DistributedTensor, mesh: Mesh, layout: LayoutLike | None = None) -> DistributedTensor:
    """See `DistributedTensor.to`."""
    if isinstance(layout, torch.dtype):
        raise ProgramError(
            f"to(mesh, {layout}): the argument after the mesh is a layout",
            hint=f"x.to({layout}).to(mesh)    # right: sent in the new dtype; x.to(mesh).to({layout}) in the old one",
            source=user_source(),
        )
    type_ = TensorType(tensor.dtype, tuple(tensor.shape))
    wanted = None if layout is None else as_layout(layout, type_, mesh.spec, "the tensor", user_source())
    if mesh is tensor.mesh:
        return tensor if wanted is None else constrain(tensor, wanted)
    if mesh._root is not tensor.mesh._root:
        raise apart_error(tensor.mesh, mesh)
    if (own := varying_of(tensor)) or (wanted is not None and (wanted.partial or wanted.varying)):
        raise ProgramError(
            f"to() of a tensor that varies along '{own[0]}'" if own else f"to() in the layout {wanted}",
            hint="what comes to another mesh is one value: monarch.reduce(x, dims) makes one of what workers have of "
            "their own,\nand a layout with partial<…> or varying<…> is none that it can come in.",
            source=user_source(),
        )
    if current.recording is not None and current.recording.inside:
        raise ProgramError(
            f"to({mesh!r}) in {current.recording.inside}: whichever way the workers go, the others would wait for them",
            hint="move the tensor there before the call, and its result back after it.",
            source=user_source(),
        )
    made: DistributedTensor = _Transfer.apply(tensor, mesh, wanted)
    return made


class _Transfer(torch.autograd.Function):
    """The identity, on another mesh. The gradient comes back, in the layout of the sent value where that is known."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: Mesh, layout: Layout | None) -> torch.Tensor:
        assert isinstance(tensor, DistributedTensor)
        cell = tensor._ref.cell
        known = cell.placed and tensor._ref.parent is None and not cell.type.layout.partial
        ctx.back = tensor.mesh, cell.type.layout if known else None
        return _moved(tensor, mesh, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        assert isinstance(gradient, DistributedTensor)
        mesh, layout = ctx.back
        return (gradient if gradient.mesh is mesh else _Transfer.apply(gradient, mesh, layout)), None, None


def _moved(tensor: DistributedTensor, mesh: Mesh, layout: Layout | None) -> DistributedTensor:
    recording = current.recording
    if recording is None:
        return _moved_outside(tensor.detach(), mesh, layout)
    value = recording.value_of(tensor._ref)
    recording.join(mesh)
    assert recording.places is not None
    name = recording.places.name(mesh)
    return recording.own(ops.transfer, (value, name, layout), tuple(tensor.shape), tensor.dtype)


def _moved_outside(tensor: torch.Tensor, mesh: Mesh, layout: Layout | None) -> DistributedTensor:
    """Outside of programs it is a program of its own, which the mesh remembers."""
    key = ("to", layout)
    if key not in mesh._programs:
        mesh._programs[key] = operations.program(lambda x: transfer(x, mesh, layout), None)
    moved: DistributedTensor = mesh._programs[key](tensor)
    return moved
