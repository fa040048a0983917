"""Equal forms of a nest: without unused statements, over fewer dims, and over dims in another order.

nest [64, 1, 256] { %0 = load a0 [256, 0, 1]  ... }    ->    nest [16384] { %0 = load a0 [1]  ... }
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from monarch.compiler.loops.ir import Constant, Index, Load, Nest, Op, Position, Reduce, Statement, Store


def operands(statement: Statement) -> tuple[int, ...]:
    """The values that a statement uses."""
    match statement:
        case Load(_, _, gather):
            return (gather,) if gather >= 0 else ()
        case Op(_, args):
            return args
        case Reduce(_, arg):
            return (arg,)
        case Store(_, _, value):
            return (value,)
        case _:
            return ()


def live(body: Sequence[Statement], *, gathers: bool = False) -> frozenset[int]:
    """The stores, with `gathers` the gathers too (they may fail), and the statements that those depend on."""
    found: set[int] = set()
    for number in range(len(body) - 1, -1, -1):
        statement = body[number]
        root = isinstance(statement, Store) or (gathers and isinstance(statement, Load) and statement.gather >= 0)
        if root or number in found:
            found.add(number)
            found.update(operands(statement))
    return frozenset(found)


MOST_ROWS = 128
"""Of a piece of a sum over kept dims, as long as there are no more than MOST_PIECES: one after the other they are added
to elements that stay in a cache."""
LEAST_ROWS = 16
"""Of a piece: with fewer elements, putting the pieces together would cost much."""
ENOUGH_PIECES = 16
"""For threads to share."""
MOST_PIECES = 256


def pieces_of(nest: Nest) -> tuple[int, int]:
    """In how many pieces of which dim the stores of a nest that add up are taken: of one over which they all do, and
    whose position nothing asks for. 1 where that would be too few rows, or there are no equal pieces."""
    positions = {statement.dim for statement in nest.body if isinstance(statement, Position)}
    dims = set(range(len(nest.kept))) - positions
    dims -= {dim for store in nest.sums for dim, stride in enumerate(store.index.strides) if stride}
    return max(((_pieces(nest.dims[dim]), dim) for dim in sorted(dims)), default=(1, 0))


def _pieces(rows: int) -> int:
    wanted = max(-(-rows // MOST_ROWS), min(ENOUGH_PIECES, rows // (2 * LEAST_ROWS)))
    most = min(MOST_PIECES, rows // LEAST_ROWS)
    return next((pieces for pieces in range(min(wanted, most), most + 1) if pieces > 1 and not rows % pieces), 1)


def renumbered(statement: Statement, values: Mapping[int, int]) -> Statement:
    """The statement with the values that it uses by their new numbers."""
    match statement:
        case Load(_, _, gather) if gather >= 0:
            return replace(statement, gather=values[gather])
        case Op(_, args):
            return replace(statement, args=tuple(values[arg] for arg in args))
        case Reduce(_, arg):
            return replace(statement, arg=values[arg])
        case Store(_, _, value):
            return replace(statement, value=values[value])
        case _:
            return statement


def over(nest: Nest, dims: Sequence[Sequence[int]]) -> Nest:
    """The nest over new dims, kept ones first. Each stands for some of the old ones, outermost first, which every index
    runs on through from one to the next; old dims that are in none have size 1. Values keep their numbers."""
    place = {old: new for new, members in enumerate(dims) for old in members}

    def moved(statement: Statement) -> Statement:
        match statement:
            case Load(_, index) | Store(_, index):
                strides = tuple(index.strides[members[-1]] for members in dims)
                return replace(statement, index=Index(index.offset, strides))
            case Position(dim):
                return Position(place[dim]) if dim in place else Constant(0, torch.int64)
            case _:
                return statement

    return replace(
        nest,
        dims=tuple(math.prod(nest.dims[dim] for dim in members) for members in dims),
        reduced=sum(members[0] >= len(nest.kept) for members in dims),
        body=tuple(moved(statement) for statement in nest.body),
    )


def joined(nest: Nest, order: Sequence[int], used: Collection[int] | None = None) -> Nest:
    """The nest over the dims in `order` (kept ones first; the others have size 1), each as one with the dim outside of
    it where every index runs on from one to the next, and nothing asks for a position along them. Only the statements
    `used` count, by default all."""
    body = nest.body if used is None else [nest.body[number] for number in sorted(used)]
    positions = {statement.dim for statement in body if isinstance(statement, Position)}
    strides = [statement.index.strides for statement in body if isinstance(statement, Load | Store)]
    dims: list[list[int]] = []
    for dim in order:
        outer = dims[-1][-1] if dims else dim
        one_kind = (outer < len(nest.kept)) == (dim < len(nest.kept))
        if (
            outer != dim
            and one_kind
            and not positions & {outer, dim}
            and all(each[outer] == each[dim] * nest.dims[dim] for each in strides)
        ):
            dims[-1].append(dim)
        else:
            dims.append([dim])
    return over(nest, dims)
