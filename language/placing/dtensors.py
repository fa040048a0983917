"""Between tensors on a mesh and PyTorch's DTensors."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.errors import LayoutError, MonarchError
from monarch.compiler.types import Layout
from monarch.language.layouts import LayoutLike
from monarch.language.placing.distribute import distribute
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor


def to_dtensor(tensor: DistributedTensor, device_mesh: Any) -> Any:
    """See `DistributedTensor.to_dtensor`."""
    # Loaded here: PyTorch's distributed tensors take long to load, and few programs have some.
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout = tensor.sharding
    if layout.varying:
        raise LayoutError(
            f"a tensor that varies along '{layout.varying[0]}' is no DTensor: each worker has a value of its own",
            hint="take one worker's: x.to_local(...).",
            source=user_source(),
        )
    if layout.partial:
        tensor, layout = tensor.redistribute(Layout(layout.shards)), Layout(layout.shards)
    names = tensor.mesh.mesh_dim_names
    device_mesh = _alone(names) if device_mesh is None else device_mesh
    if tuple(device_mesh.mesh_dim_names or ()) != names:
        raise LayoutError(
            f"the device mesh has the dims {device_mesh.mesh_dim_names}, and the tensor's mesh {names}",
            hint=f"make it so: init_device_mesh('cpu', {tensor.mesh.shape}, mesh_dim_names={names}).",
            source=user_source(),
        )
    placements = [Replicate() if (dim := layout.placement(name)) is None else Shard(int(dim)) for name in names]
    shape, start = compute_local_shape_and_global_offset(tensor.shape, device_mesh, placements)
    part: torch.Tensor = tensor.detach()
    for dim, (first, length) in enumerate(zip(start, shape, strict=True)):
        if (first, length) != (0, part.shape[dim]):
            part = part.narrow(dim, min(first, part.shape[dim]), length)
    assert isinstance(part, DistributedTensor)
    local = part.full_tensor()
    stride = torch.empty_like(tensor, device="meta").stride()
    made = DTensor.from_local(local, device_mesh, placements, run_check=False, shape=tensor.shape, stride=stride)
    return made.requires_grad_(tensor.requires_grad)


def _alone(names: tuple[str, ...]) -> Any:
    """A device mesh of this process alone. Starts PyTorch's process group for it where there is none."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if distributed.get_world_size() != 1:
        raise MonarchError(
            f"this process is one of {distributed.get_world_size()}: to_dtensor() needs the device mesh",
            hint="x.to_dtensor(device_mesh), in each of them that has x.",
            source=user_source(),
        )
    return init_device_mesh("cpu", (1,) * max(1, len(names)), mesh_dim_names=names or ("alone",))


def from_dtensor(tensor: Any, mesh: Mesh, layout: LayoutLike | None = None) -> DistributedTensor:
    """A DTensor of PyTorch's on a mesh, in the layout that it has: mesh dims that its device mesh has too, by name,
    shard the same tensor dims; or in the given layout.

        x = monarch.from_dtensor(d, mesh)

    Its data comes to this process, in one tensor: all processes of the DTensor have to call its `full_tensor()` along
    with this one. Raises LayoutError for what is no DTensor, and where the layout does not fit."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        raise LayoutError(
            f"from_dtensor() takes a DTensor, and this is a {type(tensor).__name__}",
            hint="monarch.distribute(tensor, mesh, layout) places a plain one.",
            source=user_source(),
        )
    if layout is None:
        layout = Layout.replicated(tensor.ndim)
        for name, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False):
            if name in mesh.mesh_dim_names and placement.is_shard():
                layout = layout.place(name, placement.dim % tensor.ndim)  # type: ignore[attr-defined]
    whole: torch.Tensor = tensor.full_tensor().detach()
    return distribute(whole.requires_grad_(tensor.requires_grad), mesh, layout)


__all__ = ["from_dtensor", "to_dtensor"]
