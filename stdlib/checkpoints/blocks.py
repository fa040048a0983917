"""Which worker writes what of a tensor: the blocks that it holds, and of those that several hold its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from monarch.compiler.blocks import start_of
from monarch.compiler.errors import CheckpointError
from monarch.compiler.types import Layout, MeshSpec, TensorType
from monarch.language import DistributedTensor

_SHARE_BYTES = 4 << 20
"""Replicas share a block that has more bytes: each writes a part."""
_LARGEST = 1 << 30


@dataclass(frozen=True)
class BlockPart:
    """One worker's part: `length` elements along `dim` of its block, from `start` on. In the tensor it begins at
    `offsets`, and has these sizes."""

    rank: int
    dim: int
    start: int
    length: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class SavedTensor:
    """A tensor that is saved: on a mesh (`handle` and `mesh`), or here (`plain`)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    type: TensorType | None = None
    handle: Any = None
    mesh: Any = None
    plain: torch.Tensor | None = None


def source_of(name: str, tensor: torch.Tensor) -> SavedTensor:
    """A tensor as it is now. Raises CheckpointError for one without one value."""
    if not isinstance(tensor, DistributedTensor):
        if tensor.layout is not torch.strided or tensor.is_meta:
            what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise CheckpointError(f"'{name}' cannot be saved: it is {what}")
        return SavedTensor(name, tensor.dtype, tuple(tensor.shape), plain=tensor.detach().cpu().contiguous().clone())
    layout = tensor.sharding
    if layout.varying:
        raise CheckpointError(
            f"'{name}' cannot be saved: each worker along '{layout.varying[0]}' has a value of its own",
            hint="save monarch.reduce(x), or one worker's: x.to_local(...).",
        )
    if layout.partial:
        tensor = relaid(tensor, Layout(layout.shards))
    handle, mesh = tensor._value()
    return SavedTensor(name, tensor.dtype, tuple(tensor.shape), handle.type, handle, mesh)


def relaid(tensor: DistributedTensor, layout: Layout) -> DistributedTensor:
    """A tensor in another layout, without history."""
    with torch.no_grad():
        return tensor.detach().redistribute(layout)


def key_of(tensor: torch.Tensor) -> Any:
    """The key of tensors that are one value under several names."""
    if isinstance(tensor, DistributedTensor):
        ref = tensor._ref
        return ("mesh", id(ref.cell)) if ref.parent is None else ("view", id(ref))
    at = tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() else id(tensor)
    return "plain", at, tensor.dtype, tuple(tensor.shape), tensor.stride()


class Shares:
    """Shares work among the workers of meshes evenly."""

    def __init__(self) -> None:
        self._load: Counter[tuple[int, int]] = Counter()

    def parts(self, source: SavedTensor) -> Iterator[BlockPart]:
        """The parts of a tensor that workers write: each element once."""
        type_, mesh = source.type, source.mesh.spec
        assert type_ is not None
        size = source.dtype.itemsize
        empty = True
        for ranks in _groups(type_.layout, mesh):
            start = start_of(type_, mesh, ranks[0])
            local = type_.local_shape(mesh)
            shape = tuple(
                max(0, min(length, whole - at)) for at, length, whole in zip(start, local, source.shape, strict=True)
            )
            if not prod(shape) and not (empty and not prod(source.shape)):
                continue  # padding alone; of an empty tensor one block stands for it
            empty = False
            count = min(len(ranks), -(-prod(shape) * size // _SHARE_BYTES))
            for low, high, dim in _cut(shape, max(count, -(-prod(shape) * size // _LARGEST))):
                rank = min(ranks, key=lambda rank: self._load[id(source.mesh), rank])
                offsets = tuple(at + low * (here == dim) for here, at in enumerate(start))
                sizes = tuple(high - low if here == dim else length for here, length in enumerate(shape))
                self._load[id(source.mesh), rank] += prod(sizes) * size
                yield BlockPart(rank, dim, low, high - low, offsets, sizes)


def _cut(shape: tuple[int, ...], count: int) -> Iterator[tuple[int, int, int]]:
    """Cut a block into about so many parts along the first dim that is not 1: (start, end, dim)."""
    dim = next((dim for dim, length in enumerate(shape) if length != 1), 0)
    length = shape[dim] if shape else 1
    count = max(1, min(count, length))
    for at in range(count):
        low, high = length * at // count, length * (at + 1) // count
        yield low, high, dim


@lru_cache(1024)
def _groups(layout: Layout, mesh: MeshSpec) -> list[tuple[int, ...]]:
    """The workers that hold the same block, for each block in order."""
    apart = set(layout.mesh_dims)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, point in enumerate(mesh.coordinates()):
        found.setdefault(tuple(at for name, at in point.items() if name in apart), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


__all__ = ["BlockPart", "Shares", "SavedTensor", "key_of", "relaid", "source_of"]
