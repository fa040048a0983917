"""What the parts of a plan send each other: transfers, and who reads which block from whom.

The instructions of all parts stand in one global order, of which each part has its own: transfer k, its `send` in one
part and its `recv` in another, stands before transfer k + 1. A part waits in `send` or `recv` only for what stands
before it in that order, so no schedule of the parts waits in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from monarch.compiler.errors import Source
from monarch.compiler.layout import MeshSpec, nested_index
from monarch.compiler.tensor_type import TensorType

ALIGN = 64
"""Every block that is sent starts at a multiple of so many bytes."""


@dataclass(frozen=True)
class Transfer:
    """A value that one part sends and another receives. The number by which `send` and `recv` name it is its place in
    `Plan.transfers`.

    `source`, `target`  the parts, by number
    `sent`, `received`  its type on either: the same shape and dtype, each in a layout without pending reductions
    `name`              the value's name in the traced graph
    `line`              where the user wrote it
    """

    source: int
    target: int
    sent: TensorType
    received: TensorType
    name: str = ""
    line: Source | None = None


class Route(NamedTuple):
    """A block of elements that one worker reads from another.

    `source`, `target`  the workers, each numbered in its own part
    `shape`             the block's sizes, all from 1
    `start`             where it begins within what the source holds
    `into`              where it begins within what the target holds
    `at`                where the source puts it, row-major, in bytes from the beginning of the transfer's place
    """

    source: int
    target: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    into: tuple[int, ...]
    at: int


def routes(sent: TensorType, source: MeshSpec, received: TensorType, target: MeshSpec) -> tuple[Route, ...]:
    """Which worker reads what from which, for a value of the type `sent` on the mesh `source` and `received` on
    `target`: each element of each block of the target from one worker, in the order of targets.

    Replicas of a source block are asked in turn, so that each serves as many bytes as the others, to within one block.
    Blocks that several workers read from one are put there once. Padding is nobody's: where no route leads, what a
    worker receives holds zeros.
    """
    return _routes(sent, sent.padding, source, received, received.padding, target)  # equal types may differ in padding


@lru_cache(maxsize=1024)
def _routes(
    sent: TensorType, _: object, source: MeshSpec, received: TensorType, __: object, target: MeshSpec
) -> tuple[Route, ...]:
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, box in enumerate(boxes(sent, source)):
        holders.setdefault(box, []).append(rank)
    served = [0] * source.workers
    ends = [0] * source.workers
    places: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    found: list[Route] = []
    for rank, wanted in enumerate(boxes(received, target)):
        for held, ranks in holders.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            shape = tuple(stop - start for start, stop in common)
            start = tuple(first - own for (first, _), (own, _) in zip(common, held, strict=True))
            into = tuple(first - own for (first, _), (own, _) in zip(common, wanted, strict=True))
            nbytes = math.prod(shape) * sent.dtype.itemsize
            sender = min(ranks, key=lambda each: (served[each], (each, start, shape) not in places, each))
            served[sender] += nbytes
            at = places.get((sender, start, shape))
            if at is None:
                at = places[sender, start, shape] = ends[sender]
                ends[sender] = -(-(at + nbytes) // ALIGN) * ALIGN
            found.append(Route(sender, rank, shape, start, into, at))
    return tuple(found)


def boxes(type_: TensorType, mesh: MeshSpec) -> Iterator[tuple[tuple[int, int], ...]]:
    """For each worker the elements of a value that it holds, from where to where along each dim, without padding."""
    sizes = type_.unpadded.shape
    local = type_.local_shape(mesh)
    for position in mesh.coordinates():
        yield tuple(
            (min(start, size), min(start + length, size))
            for names, length, size in zip(type_.layout.shards, local, sizes, strict=True)
            for start in [nested_index(names, position, mesh.sizes) * length]
        )


def moved_bytes(found: tuple[Route, ...], itemsize: int) -> int:
    """The bytes that all workers together receive."""
    return sum(math.prod(route.shape) for route in found) * itemsize
