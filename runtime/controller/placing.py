"""Placing a tensor of the controller's on the workers: which blocks there are, and which worker gets which."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from monarch.compiler.blocks import block_of
from monarch.compiler.plan import MeshSpec, TensorType
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place


@dataclass(frozen=True)
class Blocks:
    """The distinct blocks of a tensor, as rows of bytes, and the number of each worker's."""

    type: TensorType
    shape: tuple[int, ...]
    distinct: list[torch.Tensor]
    of_worker: list[int]
    size: int

    @staticmethod
    def of(tensor: torch.Tensor, type: TensorType, mesh: MeshSpec) -> Blocks:
        """Those for the workers of a mesh."""
        firsts, of_worker = _sharing(type, mesh)
        distinct = [wire.raw(block_of(tensor, type, mesh, rank)) for rank in firsts]
        return Blocks(type, type.local_shape(mesh), distinct, of_worker, distinct[0].numel())

    def on(self, place: Place, workers: int) -> Blocks:
        """The same for these of so many workers: the others get none, which is -1."""
        numbers = [-1] * workers
        for rank, number in zip(place.ranks, self.of_worker, strict=True):
            numbers[rank] = number
        return replace(self, of_worker=numbers)

    def head(self, handle: int, offset: int, piece: slice) -> bytes:
        """The PUT record up to the piece's bytes."""
        code = wire.DTYPE_CODES[self.type.dtype]
        return wire.PUT_HEAD.pack(
            wire.PUT, handle, code, len(self.shape), self.size, offset, piece.start, piece.stop, len(self.of_worker)
        ) + wire.numbers(*self.shape, *self.of_worker)


@functools.lru_cache(1024)
def _sharing(type: TensorType, mesh: MeshSpec) -> tuple[list[int], list[int]]:
    """The first worker that has each distinct block of a value, and the number of each worker's block."""
    partial = {name for name, _ in type.layout.partial}
    numbers: dict[tuple[int, ...], int] = {}
    firsts: list[int] = []
    of_worker: list[int] = []
    for rank, key in enumerate(places_of(type, mesh)):
        # A partial value that is placed is in the first place along its mesh dims; the others have zeros.
        key = tuple(min(at, 1) if name in partial else at for name, at in zip(mesh.names, key, strict=True))
        if key not in numbers:
            numbers[key] = len(firsts)
            firsts.append(rank)
        of_worker.append(numbers[key])
    return firsts, of_worker


def places_of(type: TensorType, mesh: MeshSpec) -> list[tuple[int, ...]]:
    """For each worker, in order, its place along the mesh dims over which a value is not replicated: those at the same
    place hold the same."""
    apart = set(type.layout.mesh_dims)
    return [tuple(at if name in apart else 0 for name, at in point.items()) for point in mesh.coordinates()]


def pieces(size: int, copies: int, limit: int) -> Iterator[slice]:
    """Cut `size` bytes, of which there are `copies`, so that all copies of a piece take at most `limit`. At least one
    piece, and boundaries at multiples of 64 where the limit allows it."""
    step = max(1, limit // copies)
    step = step // 64 * 64 or step
    for start in range(0, max(size, 1), step):
        yield slice(start, min(start + step, size))
