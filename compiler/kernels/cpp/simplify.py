"""A nest in its plainest form, before loops are laid out: only live statements, no dims of size 1, adjacent dims merged
where every address allows it, each dim that strides further standing outside those that stride less.

    nest [64, 1, 256] { %0 = load a0 [256, 0, 1]  ... }    ->    nest [16384] { %0 = load a0 [1]  ... }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from monarch.compiler.kernels.ir import Constant, Index, Load, Nest, Op, Position, Reduce, Statement, Store


@dataclass(frozen=True)
class Simple:
    """The nest, and for each of its statements the number that it had before."""

    nest: Nest
    origin: tuple[int, ...]


def simplify(nest: Nest, dtypes: Sequence[torch.dtype | None]) -> Simple:
    nest, origin = _live(nest)
    nest = _without_ones(nest, [dtypes[number] for number in origin])
    nest = _sorted(nest)
    while (at := _mergeable(nest)) is not None:
        nest = _merged(nest, at)
    return Simple(nest, origin)


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


def _live(nest: Nest) -> tuple[Nest, tuple[int, ...]]:
    """Stores, gathers (which may fail), and what they need; and each of them once."""
    same: dict[Statement, int] = {}
    number_of: dict[int, int] = {}
    body: list[Statement] = []
    used: set[int] = set()
    for number in reversed(range(len(nest.body))):
        statement = nest.body[number]
        if number in used or isinstance(statement, Store) or (isinstance(statement, Load) and statement.gather >= 0):
            used.add(number)
            used.update(operands(statement))
    origin: list[int] = []
    for number in sorted(used):
        statement = _renumbered(nest.body[number], number_of)
        if isinstance(statement, (Load, Position, Op)):
            if (found := same.setdefault(statement, len(body))) != len(body):
                number_of[number] = found
                continue
        number_of[number] = len(body)
        body.append(statement)
        origin.append(number)
    lines = tuple(nest.lines[number] for number in origin) if nest.lines else ()
    return replace(nest, body=tuple(body), lines=lines), tuple(origin)


def _renumbered(statement: Statement, number_of: dict[int, int]) -> Statement:
    match statement:
        case Load(_, _, gather) if gather >= 0:
            return replace(statement, gather=number_of[gather])
        case Op(_, args):
            return replace(statement, args=tuple(number_of[arg] for arg in args))
        case Reduce(_, arg):
            return replace(statement, arg=number_of[arg])
        case Store(_, _, value):
            return replace(statement, value=number_of[value])
        case _:
            return statement


def _with_indices(nest: Nest, dims: Sequence[int], reduced: int, old: Sequence[Sequence[int]]) -> Nest:
    """The nest over new dims, each of which stands for some old ones (the last of which gives the stride)."""
    place = {members[-1]: at for at, members in enumerate(old)}

    def changed(statement: Statement) -> Statement:
        match statement:
            case Load(_, index) | Store(_, index):
                strides = tuple(index.strides[members[-1]] for members in old)
                return replace(statement, index=Index(index.offset, strides))
            case Position(dim):
                return Position(place[dim]) if dim in place else Constant(0, torch.int64)
            case _:
                return statement

    return replace(nest, dims=tuple(dims), reduced=reduced, body=tuple(map(changed, nest.body)))


def _without_ones(nest: Nest, dtypes: Sequence[torch.dtype | None]) -> Nest:
    first = len(nest.dims) - nest.reduced
    reduces = any(isinstance(statement, Reduce) for statement in nest.body)
    left = [dim for dim, size in enumerate(nest.dims) if size > 1]
    reduced = sum(dim >= first for dim in left) if reduces else 0
    nest = _with_indices(nest, [nest.dims[dim] for dim in left], reduced, [(dim,) for dim in left])
    if reduces and not reduced:  # over one element each: the element itself, as a cast to its own dtype
        body = tuple(
            Op("cast", (statement.arg,), dtype) if isinstance(statement, Reduce) and dtype is not None else statement
            for statement, dtype in zip(nest.body, dtypes, strict=True)
        )
        nest = replace(nest, body=body)
    return nest


def _sorted(nest: Nest) -> Nest:
    """Kept dims among each other and reduced dims among each other, by strides: of the stores first, then of the loads
    that come to the most elements."""

    def weight(statement: Load | Store) -> tuple[bool, int]:
        elements = 1
        for size, stride in zip(nest.dims, statement.index.strides, strict=True):
            elements *= size if stride else 1
        return isinstance(statement, Load), -elements

    accesses = sorted((s for s in nest.body if isinstance(s, (Load, Store))), key=weight)
    keys = [tuple(-access.index.strides[dim] for access in accesses) for dim in range(len(nest.dims))]
    first = len(nest.dims) - nest.reduced
    order = sorted(range(first), key=keys.__getitem__) + sorted(range(first, len(keys)), key=keys.__getitem__)
    return _with_indices(nest, [nest.dims[dim] for dim in order], nest.reduced, [(dim,) for dim in order])


def _mergeable(nest: Nest) -> int | None:
    """A dim that can be merged with the next one."""
    positions = {statement.dim for statement in nest.body if isinstance(statement, Position)}
    indices = [statement.index for statement in nest.body if isinstance(statement, (Load, Store))]
    for at in range(len(nest.dims) - 1):
        if at + 1 == len(nest.dims) - nest.reduced or positions & {at, at + 1}:
            continue
        if all(index.strides[at] == index.strides[at + 1] * nest.dims[at + 1] for index in indices):
            return at
    return None


def _merged(nest: Nest, at: int) -> Nest:
    dims = (*nest.dims[:at], nest.dims[at] * nest.dims[at + 1], *nest.dims[at + 2 :])
    old = [(at, at + 1) if dim == at else (dim,) for dim in range(len(nest.dims)) if dim != at + 1]
    reduced = nest.reduced - (at >= len(nest.dims) - nest.reduced)
    return _with_indices(nest, dims, reduced, old)
