"""The order of a nest's loops: which dim the vectors run along, the order of the others, and which loop threads divide.

Three forms, told apart by the dim of the vectors, which is that along which most memory is next to each other:

- *pointwise*: no reduction; that dim is the innermost loop.
- *rows*: it is a reduced dim; each row is reduced by one lane of accumulators.
- *columns*: it is a kept dim; a block of columns has its accumulators in an array, and the rows go by.

Where stores add up, the outermost loop is one along which they all move, so that whoever runs a part of it has elements
of his own; and the vectors run along a dim along which they move, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarch.compiler.loops.ir import Index, Load, Nest, Reduce, Store

LANES = 16
TILE = 32
_MOST_ARRAYS = 64
"""Reductions of a nest that has columns: each takes arrays on the stack."""


@dataclass(frozen=True)
class Schedule:
    """`kept` and `reduced` are loops from the outermost to the innermost, `vector` among the last of one of them.
    `split` is the kept loop that threads divide, or -1. `tile` is the loop around the vector's where the two
    are cut into blocks, so that reads at a stride touch few cache lines; or -1."""

    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    vector: int
    split: int
    tile: int = -1

    @property
    def columns(self) -> bool:
        return bool(self.reduced) and self.vector in self.kept


def schedule(nest: Nest) -> Schedule:
    """For a simplified nest."""
    if not nest.dims:
        return Schedule((), (), -1, -1)
    first = len(nest.dims) - nest.reduced
    columns = not nest.sums and sum(isinstance(statement, Reduce) for statement in nest.body) <= _MOST_ARRAYS
    dims: Sequence[int] = range(len(nest.dims)) if columns or not nest.reduced else range(first, len(nest.dims))
    if nest.sums and not nest.reduced:
        dims = [dim for dim in dims if _all_move(nest, dim)] or dims
    vector = min(reversed(dims), key=lambda dim: _cost(nest, dim))
    kept = [dim for dim in range(first) if dim != vector]
    reduced = [dim for dim in range(first, len(nest.dims)) if dim != vector]
    (kept if vector < first else reduced).append(vector)
    if nest.sums:
        own = [dim for dim in kept if dim != vector and _all_move(nest, dim)]
        split = max(own, key=lambda dim: nest.sums[0].index.strides[dim], default=-1)
        if own:
            kept.remove(split)
            kept.insert(0, split)
        return Schedule(tuple(kept), tuple(reduced), vector, split)
    tile = -1 if nest.reduced else _tile(nest, vector)
    if tile >= 0:
        kept.remove(tile)
        kept.insert(-1, tile)
    return Schedule(tuple(kept), tuple(reduced), vector, _split(nest, kept), tile)


def _all_move(nest: Nest, dim: int) -> bool:
    return all(store.index.strides[dim] for store in nest.sums)


def _accesses(nest: Nest) -> list[tuple[Index, frozenset[int]]]:
    """The addresses of the nest, and the dims along which they are picked by a value."""
    return [
        (
            statement.index,
            nest.varies[statement.gather] if isinstance(statement, Load) and statement.gather >= 0 else frozenset(),
        )
        for statement in nest.body
        if isinstance(statement, (Load, Store))
    ]


def _cost(nest: Nest, dim: int) -> float:
    """The cost of an element, where vectors run along a dim: of its memory accesses and the loop's start and end."""
    size = nest.dims[dim]
    shortest = max(1 / LANES, 1 / size)
    cost = 2 / size
    for index, picked in _accesses(nest):
        stride = index.strides[dim]
        if dim in picked or stride > 1:
            cost += 1
        else:
            cost += shortest if stride else 1 / size
    if dim < len(nest.dims) - nest.reduced:
        cost += 0.1 * sum(isinstance(statement, Reduce) for statement in nest.body)
    return cost


def _tile(nest: Nest, vector: int) -> int:
    """A dim along which something is read one after the other that vectors read at a stride."""
    for index, picked in _accesses(nest):
        if index.strides[vector] > 1 and not picked:
            for dim, stride in enumerate(index.strides):
                if stride == 1 and nest.dims[dim] >= TILE // 2 and nest.dims[vector] >= TILE // 2:
                    return dim
    return -1


def _split(nest: Nest, kept: Sequence[int]) -> int:
    """The outermost loop with enough positions to divide, or else the longest."""
    for dim in kept:
        if nest.dims[dim] >= LANES:
            return dim
    return max(kept, key=lambda dim: nest.dims[dim], default=-1)
