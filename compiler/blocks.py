"""Between a global tensor and the blocks of it that workers hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

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
    """What worker `rank` holds of a global tensor without padding: a view of it, or, at the end of a dim that the mesh
    does not divide, a copy of what is left with zeros behind it.

    A partial value lies whole on the first worker along its mesh dim; the others hold the reduction's identity.
    """
    position = dict(zip(mesh.names, mesh.point(rank), strict=True))
    block = _part_of(tensor, type, mesh, rank)
    local = type.local_shape(mesh)
    if tuple(block.shape) != local:
        whole = block.new_zeros(local)
        whole[tuple(slice(length) for length in block.shape)] = block
        block = whole
    for mesh_dim, reduction in type.layout.partial:
        if position[mesh_dim] and reduction in _IDENTITY:
            block = torch.full_like(block, _IDENTITY[reduction])
    return block


def _part_of(tensor: torch.Tensor, type: TensorType, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """The part of a global tensor that worker `rank` holds, as a view: less than a block at the end of a dim that the
    mesh does not divide, and nothing behind it."""
    position = dict(zip(mesh.names, mesh.point(rank), strict=True))
    for dim, ((start, length), size) in enumerate(zip(_extents(type, mesh, position), tensor.shape, strict=True)):
        start = min(start, size)
        tensor = tensor.narrow(dim, start, min(length, size - start))
    return tensor


def _extents(type: TensorType, mesh: MeshSpec, position: Mapping[str, int]) -> list[tuple[int, int]]:
    """Where along each dim a worker's block begins, and how long it is."""
    return [
        (nested_index(names, position, mesh.sizes) * length, length)
        for names, length in zip(type.layout.shards, type.local_shape(mesh), strict=True)
    ]


def start_of(type: TensorType, mesh: MeshSpec, rank: int) -> tuple[int, ...]:
    """Where along each dim worker `rank`'s block begins; behind the tensor's end, where it holds padding alone."""
    position = dict(zip(mesh.names, mesh.point(rank), strict=True))
    return tuple(start for start, _ in _extents(type, mesh, position))


def own_part(block: torch.Tensor, type: TensorType, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """What worker `rank`'s block holds of the tensor: the block without its padding, a view."""
    position = dict(zip(mesh.names, mesh.point(rank), strict=True))
    for dim, ((start, length), size) in enumerate(
        zip(_extents(type, mesh, position), type.unpadded.shape, strict=True)
    ):
        block = block.narrow(dim, 0, max(0, min(length, size - start)))
    return block


@functools.lru_cache(1024)
def holders(type: TensorType, mesh: MeshSpec) -> tuple[int, ...]:
    """The workers whose blocks make the whole tensor: of each group of copies the first."""
    involved = set(type.layout.mesh_dims)
    return tuple(
        rank
        for rank, position in enumerate(mesh.coordinates())
        if not any(at for name, at in position.items() if name not in involved)
    )


@functools.lru_cache(1024)
def _assembly(
    type: TensorType, sizes: tuple[int, ...], mesh: MeshSpec
) -> tuple[tuple[tuple[slice, ...], tuple[int, ...]], ...]:
    """Each part of the whole tensor, whose sizes without padding these are, and the workers, in their order, that hold
    the part or a summand of it."""
    found: dict[tuple[int, ...], list[int]] = {}
    positions = list(mesh.coordinates())
    for rank in holders(type, mesh):
        start = tuple(first for first, _ in _extents(type, mesh, positions[rank]))
        found.setdefault(start, []).append(rank)
    local = type.local_shape(mesh)
    return tuple(
        (
            tuple(
                slice(min(first, size), min(first + length, size))
                for first, length, size in zip(start, local, sizes, strict=True)
            ),
            tuple(ranks),
        )
        for start, ranks in found.items()
    )


def whole_of(blocks: Sequence[torch.Tensor], type: TensorType, mesh: MeshSpec) -> torch.Tensor:
    """The global tensor from what each worker holds (in the order of ranks), without padding.

    Replicas are taken from the first worker (see `holders`); partial values are reduced. Raises LayoutError for a
    varying value.
    """
    layout = type.layout
    if layout.varying:
        raise LayoutError(
            f"a value that varies along '{layout.varying[0]}' has no global value",
            hint="ask for one worker's with to_local(**coordinates).",
        )
    if layout.is_replicated:
        return own_part(blocks[0], type, mesh, 0)
    if len({op for _, op in layout.partial}) > 1:
        raise LayoutError(f"cannot fetch a value with several pending reductions: {type}")
    sizes = tuple(type.unpadded.shape)
    reduction = next((op for _, op in layout.partial), "sum")
    parts = _assembly(type, sizes, mesh)
    if len(parts) == 1 and blocks[parts[0][1][0]].shape == sizes:  # a sum of values that nobody shards
        return reduce_in_order([blocks[rank] for rank in parts[0][1]], reduction)
    whole = torch.empty(sizes, dtype=type.dtype)
    if not whole.numel():
        return whole
    for part, ranks in parts:
        assert layout.partial or len(ranks) == 1
        total = reduce_in_order([blocks[rank] for rank in ranks], reduction)
        own = tuple(slice(at.stop - at.start) for at in part)  # without padding
        whole[part].copy_(total[own])
    return whole


__all__ = ["REDUCE", "block_of", "holders", "own_part", "reduce_in_order", "start_of", "whole_of"]
