"""After a failure in the eager door: which recorded op failed, and what stays of its tape without it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from monarch.compiler.errors import Source
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.tape import Expr, Number, Op, Tape, Value
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

_BATCH_NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)


@dataclass(frozen=True)
class _Touched:
    """The storages that an op reads, changes and makes."""

    reads: frozenset[Value]
    writes: frozenset[Value]
    makes: frozenset[Value]


def first_failed(
    tape: Tape, wanted: Iterable[Value], source: Source | None, fails: Callable[[Tape, list[Value]], bool]
) -> int:
    """The number of the first op in program order that fails.

    `wanted` are the storages whose values the tape was run for, `source` the line that the workers named. `fails` runs
    a part of the tape for some of its values, and says whether it failed. The line is a hint: one line may have made
    many ops, and a plan may come to a later failure first.
    """
    touched = [_touched(op) for op in tape.ops]
    needed = _needed(touched, wanted)

    def fails_at(number: int) -> bool:
        ahead = zip(touched[: number + 1], needed, strict=False)
        values = dict.fromkeys(root for each, use in ahead if use for root in (*each.writes, *each.makes))
        return bool(values) and fails(replace(tape, ops=tape.ops[: number + 1]), list(values))

    low, high = 0, len(tape.ops) - 1
    named = [number for number, op in enumerate(tape.ops) if op.source == source and needed[number]]
    if source is not None and named:
        high = named[-1]
        if named[0] == 0 or not fails_at(named[0] - 1):
            low = named[0]
            if low < high and fails_at(low):
                high = low
        else:
            high = named[0] - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails_at(middle) else (middle + 1, high)
    return low


def without(tape: Tape, failed: int, lost: Collection[Value]) -> tuple[Tape, set[Value], set[Value]]:
    """The tape without op number `failed` (-1: no op of this tape's) and the inputs that are `lost`, and without all
    that is recorded behind these and depends on them, or changes a tensor that was there when they failed.

    Gives that tape, the storages that depend on what failed, and the storages that have a value, or an earlier one.
    """
    lost_now = set(lost)
    inputs = {entry.value for entry in tape.inputs}
    made = set(inputs)
    before = set(inputs)  # the storages that were there when the op failed
    kept: list[Op] = []
    for number, op in enumerate(tape.ops):
        each = _touched(op)
        drops = number == failed
        if number > failed:
            drops = not lost_now.isdisjoint(each.reads | each.writes) or not before.isdisjoint(each.writes)
        else:
            before |= each.makes
        if drops:
            lost_now |= each.writes | each.makes
        else:
            kept.append(op)
            made |= each.makes
    entries = [entry for entry in tape.inputs if entry.value not in lost]
    return replace(tape, inputs=entries, ops=kept), lost_now, made - set(lost)


def drop_gradients(lost: Collection[int]) -> None:
    """Take away the gradients that a failed op was to make, by the ids of their cells: PyTorch would not have made
    them, and what adds to one would raise an old failure at a new line."""
    for each in gc.get_objects():
        if type(each) is DistributedTensor and each.is_leaf and isinstance(grad := each.grad, DistributedTensor):
            if id(grad._ref.cell) in lost:
                each.grad = None


def _needed(touched: list[_Touched], wanted: Iterable[Value]) -> list[bool]:
    """For each op, whether one of these storages may depend on it."""
    roots, needed = set(wanted), [False] * len(touched)
    for number in reversed(range(len(touched))):
        each = touched[number]
        if not roots.isdisjoint(each.writes | each.makes):
            needed[number] = True
            roots |= each.reads
    return needed


def _touched(op: Op) -> _Touched:
    outs = op.out if isinstance(op.out, tuple) else (op.out,)
    made = [out for out in outs if isinstance(out, Value)]
    if any(out.parent is not None for out in made):  # a view does nothing: it is read where it is used
        return _Touched(frozenset(), frozenset(), frozenset())
    writes: list[Any] = []
    if op.func in _BATCH_NORMS:  # the schema does not tell that training changes the running statistics
        training = op.args[5]
        writes = list(op.args[3:5]) if isinstance(training, Number) and training.value else []
    elif isinstance(op.func, torch._ops.OpOverload):
        writes = [op.argument(name) for name in memory_of(op.func).writes]
    return _Touched(frozenset(_roots((op.args, op.kwargs))), frozenset(_roots(tuple(writes))), frozenset(made))


def _roots(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        while tree.parent is not None:
            assert tree.view is not None
            yield from _roots((tree.view.args, tree.view.kwargs))
            tree = tree.parent
        yield tree
    elif isinstance(tree, (tuple, Expr)):
        for entry in tree.args if isinstance(tree, Expr) else tree:
            yield from _roots(entry)
