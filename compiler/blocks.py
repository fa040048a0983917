"""Between a global tensor and the blocks of it that workers hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from monarch.compiler.errors import LayoutError
from monarch.compiler.layout import nested_index
from monarch.compiler.types import MeshSpec, TensorType

REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}

_IDENTITY = {"sum": 0, "prod": 1}


def reduce_in_order(tensors: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The reduction from first to last: the same bits on every worker."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = REDUCE[reduction](total, tensor)
    return total


def block_of(tensor: torch.Tensor, type: TensorType, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """Worker `rank`'s block of a global tensor without padding: a view of it, or, at the end of a dim that the mesh
    does not divide, a copy of the rest with zeros behind it.

    The first worker along its mesh dim has all of a partial value; the others have the reduction's identity.
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
    """Worker `rank`'s block of the tensor without its padding, a view."""
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


@dataclass(frozen=True)
class Reading:
    """How a whole tensor is read: which workers are asked (see `holders`), and what their blocks make."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    """The tensor's, without padding."""
    dtype: torch.dtype
    parts: tuple[tuple[tuple[slice, ...], tuple[int, ...]], ...]
    """Each part of the tensor, and which of the blocks, in their order, are the part or summands of it."""
    reduction: str
    refusal: str = ""
    """Why there is no whole tensor, and what to do."""
    hint: str = ""

    def whole(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor, from the blocks of the workers in `ranks`. Raises LayoutError for a varying value."""
        if self.refusal:
            raise LayoutError(self.refusal, hint=self.hint)
        if len(self.parts) == 1 and blocks[0].shape == self.sizes:  # one block, or a sum of values that nobody shards
            return reduce_in_order(blocks, self.reduction)
        whole = torch.empty(self.sizes, dtype=self.dtype)
        if not whole.numel():
            return whole
        for part, numbers in self.parts:
            total = reduce_in_order([blocks[number] for number in numbers], self.reduction)
            own = tuple(slice(at.stop - at.start) for at in part)  # without padding
            whole[part].copy_(total[own])
        return whole


def reading(type: TensorType, mesh: MeshSpec) -> Reading:
    """How a tensor of this type is read."""
    return _reading(type, type.padding, mesh)


@functools.lru_cache(1024)
def _reading(type: TensorType, padding: tuple[int, ...], mesh: MeshSpec) -> Reading:
    layout, ranks, refusal, hint = type.layout, holders(type, mesh), "", ""
    if layout.varying:
        refusal = f"a value that varies along '{layout.varying[0]}' has no global value"
        hint = "ask for one worker's with to_local(**coordinates)."
    elif len({op for _, op in layout.partial}) > 1:
        refusal = f"cannot fetch a value with several pending reductions: {type}"
    sizes, local = tuple(type.unpadded.shape), type.local_shape(mesh)
    found: dict[tuple[int, ...], list[int]] = {}
    positions = list(mesh.coordinates())
    for number, rank in enumerate(ranks):
        start = tuple(first for first, _ in _extents(type, mesh, positions[rank]))
        found.setdefault(start, []).append(number)
    assert refusal or layout.partial or 0 in sizes or all(len(numbers) == 1 for numbers in found.values())
    parts = tuple(
        (
            tuple(
                slice(min(first, size), min(first + length, size))
                for first, length, size in zip(start, local, sizes, strict=True)
            ),
            tuple(numbers),
        )
        for start, numbers in found.items()
    )
    reduction = next((op for _, op in layout.partial), "sum")
    return Reading(ranks, sizes, type.dtype, parts, reduction, refusal, hint)


def whole_of(blocks: Sequence[torch.Tensor], type: TensorType, mesh: MeshSpec) -> torch.Tensor:
    """The global tensor from each worker's block (in the order of ranks), without padding.

    Replicas are taken from the first worker (see `holders`); partial values are reduced. Raises LayoutError for a
    varying value.
    """
    known = reading(type, mesh)
    return known.whole([blocks[rank] for rank in known.ranks])


__all__ = [
    *("REDUCE", "Reading", "block_of", "holders", "own_part", "reading", "reduce_in_order", "start_of", "whole_of"),
]
