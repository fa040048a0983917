"""`layout(x, ...)`: a program fixes the layout of a value."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.types import Layout, TensorType
from monarch.language.layouts import LayoutLike, as_layout
from monarch.language.recorder.recording import recording_for
from monarch.language.recorder.varying import varying_of
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor


class _Constrain(torch.autograd.Function):
    """The identity, with a layout that the gradient gets too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        return _record(tensor, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Constrain.apply(gradient, ctx.layout), None


def _record(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    assert isinstance(tensor, DistributedTensor)
    recording = recording_for(tensor.mesh)
    value = recording.value_of(tensor._ref)
    varying = varying_of(tensor)
    return recording.own(ops.constrain, (value, layout), tuple(tensor.shape), tensor.dtype, varying)


def constrain(tensor: DistributedTensor, layout: Layout) -> DistributedTensor:
    result: DistributedTensor = _Constrain.apply(recording_for(tensor.mesh).taken(tensor), layout)
    return result


def layout(x: torch.Tensor, layout: LayoutLike) -> DistributedTensor:
    """The same value in this layout: `h = monarch.layout(h, "[@data, -, @model]")`.

    Inside a program this binds the partitioner at this point; outside one it moves the tensor. The gradient of `x` is
    laid out the same. `layout` is text, one entry for each tensor dim (`["data", None]`), DTensor placements, or a
    Layout. Raises LayoutError where the layout does not fit the tensor or the mesh, and ProgramError for a tensor that
    is on no mesh.
    """
    source = user_source()
    if not isinstance(x, DistributedTensor):
        raise ProgramError(
            f"layout() of a plain tensor of shape {list(x.shape)}, which is on no mesh",
            hint="x = monarch.distribute(x, mesh, layout) places a plain tensor on a mesh.",
            source=source,
        )
    type_ = TensorType(x.dtype, tuple(x.shape))
    return constrain(x, as_layout(layout, type_, x.mesh.spec, "the tensor", source))
