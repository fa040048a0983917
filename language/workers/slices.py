"""`x.slice_mesh(data=0).to_mesh(mesh)`: what some workers have, for all. PyTorch Monarch's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monarch.compiler.errors import LayoutError, ProgramError
from monarch.language.recorder.varying import from_varying, varying_of
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor


@dataclass(frozen=True)
class MeshSlice:
    """A tensor as the workers at one position along mesh dims have it: what `slice_mesh` gives."""

    tensor: DistributedTensor
    positions: Mapping[str, int]

    def to_mesh(self, mesh: Mesh | None = None) -> DistributedTensor:
        """The tensor of those workers on all workers of the mesh, the same along the mesh dims that were sliced. Has a
        gradient, which is those workers'. Raises ProgramError for another mesh than the tensor's."""
        tensor = to_mesh(self.tensor, self.tensor.mesh if mesh is None else mesh)
        for dim, at in self.positions.items():
            if dim in varying_of(tensor):
                row: Any = tensor.unsqueeze(0)
                tensor = from_varying(row, dim, 0).select(0, at)
        return tensor


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
    if mesh is not tensor.mesh:
        raise ProgramError(
            f"to_mesh() from {tensor.mesh!r} to {mesh!r}",
            hint="a program runs on one mesh. Between calls: monarch.distribute(x.full_tensor(), mesh, layout).",
            source=user_source(),
        )
    return tensor
