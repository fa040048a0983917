"""A nest in its plainest form, before loops are laid out: only live statements, no dims of size 1, adjacent dims merged
where every address allows it, each dim that strides further standing outside those that stride less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from monarch.compiler.loops.ir import Load, Nest, Op, Position, Reduce, Statement, Store
from monarch.compiler.loops.nests import joined, live, over, renumbered


@dataclass(frozen=True)
class Simple:
    """The nest, and for each of its statements the number that it had before."""

    nest: Nest
    origin: tuple[int, ...]


def simplify(nest: Nest, dtypes: Sequence[torch.dtype | None]) -> Simple:
    nest, origin = _live(nest)
    nest = _without_ones(nest, [dtypes[number] for number in origin])
    # A sum over dims of size 1 is no sum.
    body = [replace(s, sums=s.sums and 0 in s.index.strides) if isinstance(s, Store) else s for s in nest.body]
    nest = replace(nest, body=tuple(body))
    return Simple(joined(nest, _by_strides(nest)), origin)


def _live(nest: Nest) -> tuple[Nest, tuple[int, ...]]:
    """Stores, gathers (which may fail), and their operands; and each of them once."""
    same: dict[Statement, int] = {}
    number_of: dict[int, int] = {}
    body: list[Statement] = []
    origin: list[int] = []
    for number in sorted(live(nest.body, gathers=True)):
        statement = renumbered(nest.body[number], number_of)
        if isinstance(statement, (Load, Position, Op)):
            if (found := same.setdefault(statement, len(body))) != len(body):
                number_of[number] = found
                continue
        number_of[number] = len(body)
        body.append(statement)
        origin.append(number)
    lines = tuple(nest.lines[number] for number in origin) if nest.lines else ()
    return replace(nest, body=tuple(body), lines=lines), tuple(origin)


def _without_ones(nest: Nest, dtypes: Sequence[torch.dtype | None]) -> Nest:
    reduces = any(isinstance(statement, Reduce) for statement in nest.body)
    if not reduces:
        nest = replace(nest, reduced=0)
    nest = over(nest, [(dim,) for dim, size in enumerate(nest.dims) if size > 1])
    if reduces and not nest.reduced:  # over one element each: the element itself, as a cast to its own dtype
        body = tuple(
            Op("cast", (statement.arg,), dtype) if isinstance(statement, Reduce) and dtype is not None else statement
            for statement, dtype in zip(nest.body, dtypes, strict=True)
        )
        nest = replace(nest, body=body)
    return nest


def _by_strides(nest: Nest) -> list[int]:
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
    return sorted(range(first), key=keys.__getitem__) + sorted(range(first, len(keys)), key=keys.__getitem__)
