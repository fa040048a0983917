"""Cutting lists of tensors into rounds: the bytes that go through the windows at once. Pure functions of shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from monarch.runtime.shared.window import aligned

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A block of tensor number `tensor`, at `offset` bytes in the area; `index` is None for the whole tensor."""

    tensor: int
    index: Index | None
    shape: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.index is None else tensor[self.index]


def cut(shape: Sequence[int], limit: int) -> Iterator[Index | None]:
    """Blocks of a tensor of `shape`, each of at most `limit` elements, in row-major order; one None if it fits whole.

    A block spans whole trailing dims, a range of one dim, and single places of the leading dims, so that it is
    contiguous in a contiguous tensor.
    """
    if math.prod(shape) <= limit:
        yield None
        return
    split, inner = len(shape) - 1, 1
    while inner * shape[split] <= limit:
        inner *= shape[split]
        split -= 1
    step = max(1, limit // inner)
    for lead in product(*(range(length) for length in shape[:split])):
        for start in range(0, shape[split], step):
            yield (*(slice(at, at + 1) for at in lead), slice(start, min(start + step, shape[split])))


def rounds(shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int], limit: int) -> list[list[Piece]]:
    """Pack blocks of the tensors, in order, into rounds of at most `limit` bytes each. Empty tensors have no blocks."""
    done: list[list[Piece]] = []
    current: list[Piece] = []
    used = 0
    for number, (shape, itemsize) in enumerate(zip(shapes, itemsizes, strict=True)):
        if math.prod(shape) == 0:
            continue
        for index in cut(shape, limit // itemsize):
            block = shape
            if index is not None:
                block = (*(cut_.stop - cut_.start for cut_ in index), *shape[len(index) :])
            size = aligned(math.prod(block) * itemsize)
            if current and used + size > limit:
                done.append(current)
                current, used = [], 0
            current.append(Piece(number, index, block, used))
            used += size
    if current:
        done.append(current)
    return done


class Flat:
    """Tensors of one dtype seen as one long row of elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.rows = [tensor.reshape(-1) for tensor in tensors]
        self.starts = [0]
        for row in self.rows:
            self.starts.append(self.starts[-1] + row.numel())
        self.length = self.starts[-1]

    def spans(self, low: int, high: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The parts of elements `low` to `high`: each a row's slice, and where it starts and ends after `low`."""
        for row, start, end in zip(self.rows, self.starts, self.starts[1:], strict=False):
            first, last = max(low, start), min(high, end)
            if first < last:
                yield row[first - start : last - start], first - low, last - low
