"""A nest in its simplest equal form, from which a GPU's programs and blocks are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from monarch.compiler.loops.ir import Index, Load, Nest, Reduce, Store
from monarch.compiler.loops.nests import joined, live, operands


def levels(nest: Nest) -> tuple[int, ...]:
    """How many reductions, one after the other, each statement waits for."""
    found: list[int] = []
    for statement in nest.body:
        level = max((found[arg] for arg in operands(statement)), default=0)
        found.append(level + isinstance(statement, Reduce))
    return tuple(found)


@dataclass(frozen=True)
class Access:
    """A live load or store, and how many bytes an element has."""

    index: Index
    itemsize: int
    is_store: bool

    def moves(self, nest: Nest, dims: Sequence[int]) -> int:
        """How many elements it touches along `dims`."""
        return math.prod(nest.dims[dim] for dim in dims if self.index.strides[dim])


def accesses(nest: Nest, itemsize: Callable[[int], int]) -> Iterator[Access]:
    """Of a nest, given the bytes of a buffer's elements."""
    alive = live(nest.body)
    for number, statement in enumerate(nest.body):
        if number in alive and isinstance(statement, Load | Store):
            yield Access(statement.index, itemsize(statement.buffer), isinstance(statement, Store))


def simplified(nest: Nest, itemsize: Callable[[int], int]) -> Nest:
    """The same nest with its kept dims, and its reduced dims, in the order in which memory is passed through, without
    dims of size 1, and with those that are one dim everywhere joined. Values keep their numbers."""
    first_reduced = len(nest.kept)
    touched = list(accesses(nest, itemsize))
    order = [
        *_ordered(nest, range(first_reduced), touched),
        *_ordered(nest, range(first_reduced, len(nest.dims)), touched),
    ]
    return joined(nest, order, live(nest.body))


def _ordered(nest: Nest, dims: Sequence[int], touched: Sequence[Access]) -> list[int]:
    """`dims` of more than one step, outermost first, as the access that touches most passes through them: stores
    before loads, for a load may come out of a cache."""
    wanted = [dim for dim in dims if nest.dims[dim] > 1]
    if not touched:
        return wanted
    guide = max(touched, key=lambda access: (access.moves(nest, wanted), access.is_store))
    return sorted(wanted, key=lambda dim: -(guide.index.strides[dim] or math.inf))
