"""A nest in its simplest equal form: what a GPU's programs and blocks are cut from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from monarch.compiler.kernels.ir import Constant, Index, Load, Nest, Op, Position, Reduce, Statement, Store


def operands(statement: Statement) -> tuple[int, ...]:
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


def live(nest: Nest) -> frozenset[int]:
    """The statements that a store depends on, and the stores."""
    found: set[int] = set()
    for number in range(len(nest.body) - 1, -1, -1):
        statement = nest.body[number]
        if number in found or isinstance(statement, Store):
            found.add(number)
            found.update(operands(statement))
    return frozenset(found)


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
    alive = live(nest)
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
    reduced = sum(dim >= first_reduced for dim in order)
    return _joined(_selected(nest, order, reduced))


def _ordered(nest: Nest, dims: Sequence[int], touched: Sequence[Access]) -> list[int]:
    """`dims` of more than one step, outermost first, as the access that touches most passes through them: stores
    before loads, for a load may come out of a cache."""
    wanted = [dim for dim in dims if nest.dims[dim] > 1]
    if not touched:
        return wanted
    guide = max(touched, key=lambda access: (access.moves(nest, wanted), access.is_store))
    return sorted(wanted, key=lambda dim: -(guide.index.strides[dim] or math.inf))


def _selected(nest: Nest, order: Sequence[int], reduced: int) -> Nest:
    """The nest over some of its dims; the others have size 1."""
    at = {dim: number for number, dim in enumerate(order)}

    def moved(statement: Statement) -> Statement:
        match statement:
            case Load(_, index) | Store(_, index):
                return replace(statement, index=Index(index.offset, tuple(index.strides[dim] for dim in order)))
            case Position(dim):
                return Position(at[dim]) if dim in at else Constant(0, torch.int64)
            case _:
                return statement

    dims = tuple(nest.dims[dim] for dim in order)
    return replace(nest, dims=dims, reduced=reduced, body=tuple(moved(statement) for statement in nest.body))


def _joined(nest: Nest) -> Nest:
    """With each dim joined to the one inside of it where all indices allow it, and nothing asks for a position."""
    alive = live(nest)
    used = [statement for number, statement in enumerate(nest.body) if number in alive]
    positions = {statement.dim for statement in used if isinstance(statement, Position)}
    strides = [statement.index.strides for statement in used if isinstance(statement, Load | Store)]
    groups: list[list[int]] = []
    for dim, size in enumerate(nest.dims):
        same_kind = bool(groups) and dim != len(nest.kept) and not positions & {dim, groups[-1][-1]}
        if same_kind and all(each[groups[-1][-1]] == each[dim] * size for each in strides):
            groups[-1].append(dim)
        else:
            groups.append([dim])

    def moved(statement: Statement) -> Statement:
        match statement:
            case Load(_, index) | Store(_, index):
                return replace(statement, index=Index(index.offset, tuple(index.strides[g[-1]] for g in groups)))
            case Position(dim):
                return Position(next((at for at, group in enumerate(groups) if dim in group), 0))
            case _:
                return statement

    dims = tuple(math.prod(nest.dims[dim] for dim in group) for group in groups)
    reduced = sum(group[0] >= len(nest.kept) for group in groups)
    return replace(nest, dims=dims, reduced=reduced, body=tuple(moved(statement) for statement in nest.body))
