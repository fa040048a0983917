"""Between a global tensor and the blocks of it that workers hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from monarch.compiler.errors import LayoutError
from monarch.compiler.local_ops import nested_index
from monarch.compiler.types import MeshSpec, TensorType

REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}

_IDENTITY = {"sum": 0, "prod": 1}


def reduce_in_order(tensors: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The reduction from first to last: the same bits whoever computes it."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = REDUCE[reduction](total, tensor)
    return total


def block_of(tensor: torch.Tensor, type: TensorType, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """What worker `rank` holds of a global tensor: a view of it.

    A partial value lies whole on the first worker along its mesh dim; the others hold the reduction's identity.
    """
    position = dict(zip(mesh.names, mesh.point(rank), strict=True))
    block = tensor
    for dim, names in enumerate(type.layout.shards):
        if names:
            length = type.local_shape(mesh)[dim]
            block = block.narrow(dim, nested_index(names, position, mesh.sizes) * length, length)
    for mesh_dim, reduction in type.layout.partial:
        if position[mesh_dim] and reduction in _IDENTITY:
            block = torch.full_like(block, _IDENTITY[reduction])
    return block


def whole_of(blocks: Sequence[torch.Tensor], type: TensorType, mesh: MeshSpec) -> torch.Tensor:
    """The global tensor from what each worker holds (in the order of ranks).

    Replicas are taken from the first worker; partial values are reduced. Raises LayoutError for a varying value.
    """
    layout = type.layout
    if layout.varying:
        raise LayoutError(
            f"a value that varies along '{layout.varying[0]}' has no global value",
            hint="ask for one worker's with to_local(**coordinates).",
        )
    if layout.is_replicated:
        return blocks[0]
    local = type.local_shape(mesh)
    whole = torch.empty(type.shape, dtype=type.dtype)
    if not whole.numel():
        return whole
    summands: dict[tuple[int, ...], list[torch.Tensor]] = {}
    partial = {name for name, _ in layout.partial}
    involved = set(layout.mesh_dims)
    for position, block in zip(mesh.coordinates(), blocks, strict=True):
        if any(at for name, at in position.items() if name not in involved):
            continue  # a replica of what an earlier worker holds
        start = tuple(
            nested_index(names, position, mesh.sizes) * length
            for names, length in zip(layout.shards, local, strict=True)
        )
        summands.setdefault(start, []).append(block)
    reduction = next((op for _, op in layout.partial), "sum")
    if len({op for _, op in layout.partial}) > 1:
        raise LayoutError(f"cannot fetch a value with several pending reductions: {type}")
    assert partial or all(len(parts) == 1 for parts in summands.values())
    for start, parts in summands.items():
        target = whole
        for dim, (at, length) in enumerate(zip(start, local, strict=True)):
            target = target.narrow(dim, at, length)
        target.copy_(reduce_in_order(parts, reduction))
    return whole


__all__ = ["REDUCE", "block_of", "reduce_in_order", "whole_of"]
