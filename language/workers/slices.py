"""`x.slice_mesh(data=0).to_mesh(mesh)`: the values of some workers, for all or on another mesh. PyTorch Monarch's
names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from monarch.compiler.errors import LayoutError, ProgramError
from monarch.compiler.types import Layout, TensorType
from monarch.language.recorder.recording import is_tracing
from monarch.language.recorder.transfer import transfer
from monarch.language.recorder.varying import from_varying, to_varying, varying_of
from monarch.language.source import user_source
from monarch.language.tensors.history import end_of, ended
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.plain import put
from monarch.language.tensors.tensor import DistributedTensor


@dataclass(frozen=True)
class MeshSlice:
    """A tensor as the workers at one position along mesh dims have it: the result of `slice_mesh`."""

    tensor: DistributedTensor
    positions: Mapping[str, int]

    def to_mesh(self, mesh: Mesh | None = None) -> DistributedTensor:
        """The tensor of those workers on all workers of a mesh, by default the tensor's own, the same along the mesh
        dims that were sliced. Has a gradient, which is those workers'. Raises the errors of
        `DistributedTensor.to_mesh`."""
        tensor = self.tensor
        for dim, at in self.positions.items():
            if dim in varying_of(tensor):
                row: Any = tensor.unsqueeze(0)
                tensor = from_varying(row, dim, 0).select(0, at)
        return to_mesh(tensor, tensor.mesh if mesh is None else mesh)


def slice_mesh(tensor: DistributedTensor, positions: Mapping[str, Any]) -> MeshSlice:
    """See `DistributedTensor.slice_mesh`."""
    mesh, found = tensor.mesh, {}
    for dim, at in positions.items():
        size = mesh.extent[mesh.mesh_dim_names[mesh.extent.position(dim)]]
        if not isinstance(at, int) or not -size <= at < size:
            raise LayoutError(
                f"slice_mesh({dim}={at!r}) of a mesh dim of {size} workers",
                hint=f"give one position from 0 to {size - 1}. A tensor of several of them is made by "
                f"monarch.permute(x, {dim!r}, pairs=…).",
                source=user_source(),
            )
        found[dim] = at % size
    return MeshSlice(tensor, found)


def to_mesh(tensor: DistributedTensor, mesh: Mesh) -> DistributedTensor:
    """See `DistributedTensor.to_mesh`."""
    if mesh is tensor.mesh:
        return tensor
    own = varying_of(tensor)
    for dim in own:
        if mesh.spec.sizes.get(dim) != tensor.mesh.spec.sizes[dim]:
            raise LayoutError(
                f"to_mesh() of a tensor that varies along '{dim}' of {tensor.mesh!r}, to {mesh!r}",
                hint="each worker's own goes to the worker at its place, so both meshes have this dim. Before:\n"
                f"x.slice_mesh({dim}=0).to_mesh(mesh)              # worker 0's, for all\n"
                f"monarch.reduce(x, {dim!r}).to_mesh(mesh)         # the workers' sum",
                source=user_source(),
            )
    blocks: Any = tensor
    for dim in reversed(own):  # as blocks, which can be sent
        blocks = from_varying(blocks.unsqueeze(0), dim, 0)
    shards = (*((dim,) for dim in own), *((),) * tensor.ndim)
    layout = replace(Layout.replicated(blocks.ndim), shards=shards) if own else None
    moved: Any = _moved(blocks, mesh, layout)
    for dim in own:
        moved = to_varying(moved, dim, 0).squeeze(0)
    return moved


def _moved(tensor: DistributedTensor, mesh: Mesh, layout: Layout | None) -> DistributedTensor:
    """On another mesh: from worker to worker, or, where no step can be of both meshes, by way of this process."""
    apart = mesh._root is not tensor.mesh._root or set(mesh.ranks) & set(tensor.mesh.ranks)
    if is_tracing() or not apart:
        return transfer(tensor, mesh, layout)
    end = end_of(tensor) if torch.is_grad_enabled() else None
    if end is None and tensor.requires_grad and torch.is_grad_enabled():
        raise ProgramError(
            f"to_mesh() from {tensor.mesh!r} to {mesh!r}, between which no gradient goes, of a tensor that needs one",
            hint="pass x.detach(). Between parts of one mesh that share no workers gradients go: root.slice(stage=0).",
            source=user_source(),
        )
    sizes, known = mesh.spec.sizes, tensor.mesh.spec.sizes
    kept = tensor.tensor_type.layout if layout is None else layout
    fits = tuple(tuple(dim for dim in dims if sizes.get(dim) == known[dim]) for dims in kept.shards)
    wanted = TensorType(tensor.dtype, tuple(tensor.shape), replace(Layout.replicated(tensor.ndim), shards=fits))
    data = tensor.full_tensor()
    if end is None:
        return put(data, mesh, wanted)
    made: DistributedTensor = ended((end, ()), put, data, mesh, wanted)  # a program's result is one there too
    return made
