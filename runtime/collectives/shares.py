"""The shared part of the algorithms: which worker's elements are where, and adding them up in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monarch.runtime.collectives.meeting import Group, Meetings, Tensors
from monarch.runtime.shared.blocks import Flat

LANE = 64
"""Elements: shares are multiples of it where that can be, so that they begin at cache lines."""


def part_of(chunk: tuple[int, int], j: int, share: int) -> tuple[int, int]:
    """The elements of a chunk that the j-th of the workers reduces, each `share` of them."""
    low, high = chunk
    return min(low + j * share, high), min(low + (j + 1) * share, high)


def write_but(
    at: Meetings, chunk: tuple[int, int], own: tuple[int, int], base: int, source: Flat, dtype: torch.dtype
) -> None:
    """Write a chunk to `base`, but for this worker's own share, which nobody else reads."""
    low, high = chunk
    place = at.window.view(base, (high - low,), dtype)
    for first, last in ((low, own[0]), (own[1], high)):
        for row, start, end in source.spans(first, last):
            place[first - low + start : first - low + end].copy_(row)


def held(
    at: Meetings, group: Group, chunk: tuple[int, int], low: int, high: int, area: int, source: Flat, dtype: torch.dtype
) -> Tensors:
    """The elements `low` to `high` of a chunk that each of the group has written to an area."""
    parts = []
    for rank in group.ranks:
        if rank != at.rank:
            base = at.base(rank, area) + (low - chunk[0]) * dtype.itemsize
            parts.append(at.window.view(base, (high - low,), dtype))
        else:
            spans = [row for row, _, _ in source.spans(low, high)] or [torch.empty(0, dtype=dtype)]
            parts.append(spans[0] if len(spans) == 1 else torch.cat(spans))
    return parts


def add(op: Any, summands: Tensors, total: torch.Tensor) -> None:
    """Add from the first to the last, into `total`."""
    if len(summands) == 1:
        total.copy_(summands[0])
        return
    op(summands[0], summands[1], out=total)
    for summand in summands[2:]:
        op(total, summand, out=total)


def whole_lanes(most: int, length: int, workers: int) -> int:
    """A share of at most `most` elements, and of at most all: whole lanes where that can be."""
    most = most // LANE * LANE or most
    return min(most, -(-length // (workers * LANE)) * LANE)


def copies(tensors: Sequence[torch.Tensor]) -> Tensors:
    """A group of one: the same values, in buffers of their own, for a plan may write a collective's result in place."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def split(tensors: Sequence[torch.Tensor], dims: Sequence[int], count: int) -> list[Sequence[torch.Tensor]]:
    """Each tensor's `count` equal blocks along its dim."""
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor.shape[dim] % count:
            raise ValueError(f"dim {dim} of a tensor of shape {list(tensor.shape)} has no {count} equal blocks")
    return [tensor.chunk(count, dim) for tensor, dim in zip(tensors, dims, strict=True)]
