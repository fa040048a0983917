"""Long reductions of few elements, and sums over kept dims, in two steps that threads can share.

    nest [ | 4194304] {                     nest [32 | 131072] {
      %0 = load a0 [1]                        %0 = load a0 [131072, 1]
      %1 = reduce sum %0             ->       %1 = reduce sum %0
      %2 = store b0 [0] %1                    %2 = store scratch [1, 0] %1
    }                                       }
                                            nest [ | 32] {
                                              %0 = load scratch [1]
                                              %1 = reduce sum %0
                                              %2 = store b0 [0] %1
                                            }

    nest [1024 | 256] {                     nest [16, 64 | 256] {
      …                                       …
      %7 = accumulate sum b1 [0, 1] %6  ->    %7 = accumulate sum scratch [256, 0, 1] %6
    }                                       }
                                            nest [256 | 16] {
                                              %0 = load scratch [1, 256]
                                              %1 = reduce sum %0
                                              %2 = store b1 [1, 0] %1
                                            }

How many pieces there are depends on the sizes alone, so the bits are the same with any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from monarch.compiler.kernels.cpp.expressions import COSTS
from monarch.compiler.loops.ir import (
    Buffer,
    Constant,
    Index,
    Kernel,
    Load,
    Nest,
    Op,
    Position,
    Reduce,
    Statement,
    Store,
    row_major,
)
from monarch.compiler.loops.nests import live, operands, pieces_of, renumbered

FEW = 16
"""Kept elements, fewer than which are too few to be shared out among threads."""
PIECES = range(16, 65)
LEAST_WORK = 1 << 24
"""Of all elements together, an addition being 1: about a millisecond. For less, starting threads and waiting for them
took as long as they spared."""
MOST_SCRATCH = 1 << 26
"""Bytes that a thread keeps for the pieces of a nest's sums, which take a 16th of the summands or less; a nest that
would need more is left to one thread."""


@dataclass(frozen=True)
class Split:
    """A kernel whose last outputs are scratch memory, and of whose nests some depend on those before them.

    `origin`   for each nest that of the kernel that it was made of, and None for one that puts pieces together
    `scratch`  how many outputs are scratch"""

    kernel: Kernel
    origin: tuple[int | None, ...]
    scratch: int


_Divided = tuple[Nest, list[Nest], list[Buffer]]
"""The nest of the pieces, those that put pieces together, and the scratch memory between them."""


def split(kernel: Kernel) -> Split:
    """The kernel with its long reductions in two steps each."""
    buffers: list[Buffer] = []
    nests: list[Nest] = []
    origin: list[int | None] = []
    known = len(kernel.inputs) + len(kernel.outputs)
    for number, (nest, dtypes) in enumerate(zip(kernel.nests, kernel.dtypes, strict=True)):
        if nest.sums:
            divided = _summed(kernel, nest, known + len(buffers))
        else:
            divided = _divided(nest, dtypes, known + len(buffers))
        if divided is None:
            nests.append(nest)
            origin.append(number)
            continue
        first, behind, scratch = divided
        buffers += scratch
        nests += first, *behind
        origin += number, *(None for _ in behind)
    whole = replace(kernel, outputs=(*kernel.outputs, *buffers), nests=tuple(nests)) if buffers else kernel
    return Split(whole, tuple(origin), len(buffers))


def _summed(kernel: Kernel, nest: Nest, number: int) -> _Divided | None:
    """A nest of stores that add up, in pieces of a dim over which they all do."""
    pieces, dim = pieces_of(nest)
    if pieces < 2:
        return None
    first = _cut(nest, dim, pieces)
    body = list(first.body)
    scratch: list[Buffer] = []
    behind: list[Nest] = []
    for at, statement in enumerate(nest.body):
        if isinstance(statement, Store) and statement.sums:
            target = kernel.buffer(statement.buffer)
            index = Index(statement.index.offset, (target.numel, *statement.index.strides))
            body[at] = replace(statement, buffer=number + len(scratch), index=index)
            behind.append(_pieces_together(statement, number + len(scratch), target.numel, pieces))
            scratch.append(Buffer.contiguous(target.dtype, (pieces, target.numel)))
    if sum(buffer.nbytes for buffer in scratch) > MOST_SCRATCH:
        return None
    return replace(first, body=tuple(body)), behind, scratch


def _pieces_together(store: Store, number: int, elements: int, pieces: int) -> Nest:
    body = (Load(number, Index(0, (1, elements))), Reduce("sum", 0), Store(store.buffer, Index(0, (1, 0)), 1))
    return Nest((elements, pieces), 1, body)


def _divided(nest: Nest, dtypes: Sequence[torch.dtype | None], number: int) -> _Divided | None:
    """The nest in two steps, and the scratch memory between them, of which the first has this number; None where it
    stays one."""
    kept = len(nest.kept)
    if not nest.reduced or math.prod(nest.kept) >= FEW:
        return None
    needed = live(nest.body, gathers=True)
    each = sum(
        COSTS.get(op.name, 1) if isinstance(op, Op) else isinstance(op, Reduce)
        for op in map(nest.body.__getitem__, needed)
    )
    if math.prod(nest.dims) * each < LEAST_WORK:
        return None
    behind = _behind(nest)
    reductions = [at for at in sorted(needed) if isinstance(nest.body[at], Reduce)]
    along = range(kept, len(nest.dims))
    for at in needed:
        statement = nest.body[at]
        if at in behind:  # of a value for each kept element
            if any(dim in along for dim in nest.varies[at]) or (isinstance(statement, Load) and statement.gather >= 0):
                return None
        elif isinstance(statement, Reduce) and not _before(nest, at):
            return None
    positions = {statement.dim for statement in nest.body if isinstance(statement, Position)}
    choices = [(dim, pieces) for dim in along for pieces in PIECES if not nest.dims[dim] % pieces]
    choice = next(((dim, pieces) for dim, pieces in choices if dim not in positions), None)
    if choice is None or not reductions:
        return None
    dim, pieces = choice
    shape = (pieces, *nest.kept)
    scratch = [Buffer.contiguous(dtype, shape) for at in reductions if (dtype := dtypes[at]) is not None]
    return (
        _pieces(nest, reductions, dim, pieces, number),
        [_together(nest, behind, reductions, pieces, number)],
        scratch,
    )


def _behind(nest: Nest) -> frozenset[int]:
    """The stores, and their operands up to the reductions, without these."""
    found: set[int] = set()
    for number in range(len(nest.body) - 1, -1, -1):
        statement = nest.body[number]
        if isinstance(statement, Store) or (number in found and not isinstance(statement, Reduce)):
            found.add(number)
            found.update(each for each in operands(statement) if not isinstance(nest.body[each], Reduce))
    return frozenset(found)


def _before(nest: Nest, reduction: int) -> bool:
    """Whether a reduction needs no other one."""
    waiting = list(operands(nest.body[reduction]))
    seen = set(waiting)
    while waiting:
        at = waiting.pop()
        if isinstance(nest.body[at], Reduce):
            return False
        new = [each for each in operands(nest.body[at]) if each not in seen]
        seen.update(new)
        waiting += new
    return True


def _pieces(nest: Nest, reductions: Sequence[int], dim: int, pieces: int, number: int) -> Nest:
    """The first step."""
    body = [Constant(False, torch.bool) if isinstance(each, Store) else each for each in nest.body]
    cut = _cut(replace(nest, body=tuple(body)), dim, pieces)
    strides = (*row_major((pieces, *nest.kept)), *(0,) * nest.reduced)
    stores = [Store(number + at, Index(0, strides), value) for at, value in enumerate(reductions)]
    lines = (*nest.lines, *(nest.lines[value] for value in reductions)) if nest.lines else ()
    return replace(cut, body=(*cut.body, *stores), lines=lines)


def _cut(nest: Nest, dim: int, pieces: int) -> Nest:
    """The nest with a dim in pieces, of which the outermost dim is. Its statements keep their numbers, by which a
    gather that fails is known."""
    inner = nest.dims[dim] // pieces

    def moved(statement: Statement) -> Statement:
        match statement:
            case Load(_, index) | Store(_, index):
                strides = (index.strides[dim] * inner, *index.strides)
                return replace(statement, index=Index(index.offset, strides))
            case Position(along):
                return Position(along + 1)
            case _:
                return statement

    dims = (pieces, *(inner if at == dim else size for at, size in enumerate(nest.dims)))
    return replace(nest, dims=dims, body=tuple(moved(statement) for statement in nest.body))


def _together(nest: Nest, behind: frozenset[int], reductions: Sequence[int], pieces: int, number: int) -> Nest:
    """The second step: the pieces together, and what follows."""
    kept = len(nest.kept)
    outer, *strides = row_major((pieces, *nest.kept))
    number_of: dict[int, int] = {}
    body: list[Statement] = []
    lines: list[str] = []
    for at, statement in enumerate(nest.body):
        if isinstance(statement, Reduce) and at in reductions:
            body.append(Load(number + reductions.index(at), Index(0, (*strides, outer))))
            statement = Reduce(statement.name, len(body) - 1)
        elif at not in behind:
            continue
        else:
            statement = renumbered(statement, number_of)
            if isinstance(statement, Load | Store):
                index = Index(statement.index.offset, (*statement.index.strides[:kept], 0))
                statement = replace(statement, index=index)
        number_of[at] = len(body)
        body.append(statement)
        if nest.lines:
            lines += [nest.lines[at]] * (len(body) - len(lines))
    return Nest((*nest.kept, pieces), 1, tuple(body), tuple(lines))
