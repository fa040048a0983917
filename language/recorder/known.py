"""Values that are known while a program is traced: those that depend on no input, no state and no random number.

Libraries make masks and index tensors inside of a model's forward, and ask whether they are causal or how many entries
are set. In a program such tensors are recorded as all others are; when Python asks for one, the ops that lead to it
are run here, on plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.symbols import is_named
from monarch.compiler.tape import Expr, Number, Op, Value
from monarch.language.recorder.recording import Recording, outside_programs
from monarch.language.tensors.tensor import DistributedTensor

_MOST_ELEMENTS = 1 << 24
_PLACES = ("device", "layout", "pin_memory", "memory_format")


def known_value(recording: Recording, tensor: DistributedTensor) -> torch.Tensor | None:
    """The tensor's value, or None where it is not known before the program runs, or takes much to compute."""
    wanted = recording.value_of(tensor._ref)
    needed, run = {wanted.root}, []
    for op in reversed(recording.tape.ops):
        made = {value.root for value in _values(op.out)}
        if not (made & needed) and not _writes(op, needed):
            continue
        if isinstance(op.func, ops.MonarchOp) or torch.Tag.nondeterministic_seeded in op.func.tags:
            return None
        needed.update(value.root for value in _values((op.args, op.kwargs)))
        run.append(op)
    env: dict[Value, torch.Tensor] = {}
    for entry in recording.tape.inputs:
        if entry.value in needed:
            if entry.tensor is None:
                return None
            env[entry.value] = entry.tensor.clone()
    if sum(value.type.nbytes for op in run for value in _values(op.out)) > _MOST_ELEMENTS:
        return None
    try:
        with outside_programs(), torch.no_grad():
            for op in reversed(run):
                _run(op, env)
            return env[wanted].clone()
    except _Unknown:
        return None


class _Unknown(Exception):
    """A number that a call takes anew stands among an op's arguments."""


def _run(op: Op, env: dict[Value, torch.Tensor]) -> None:
    def decode(argument: Any) -> Any:
        if isinstance(argument, Value):
            return env[argument]
        if isinstance(argument, Expr):
            raise _Unknown
        if isinstance(argument, tuple):
            return [decode(entry) for entry in argument]
        if is_named(argument):  # values known then are of these sizes alone
            return int(argument)
        return argument.value if isinstance(argument, Number) else argument

    result = op.func(*map(decode, op.args), **{k: decode(v) for k, v in op.kwargs if k not in _PLACES})
    outs = op.out if isinstance(op.out, tuple) else (op.out,)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for out, value in zip(outs, results, strict=False):
        if out is not None:
            env[out] = value


def _values(argument: Any) -> Iterator[Value]:
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, tuple):
        for entry in argument:
            yield from _values(entry)
    elif isinstance(argument, Expr):
        yield from _values(argument.args)


def _writes(op: Op, roots: set[Value]) -> bool:
    """Whether an op changes one of these in place."""
    if isinstance(op.func, ops.MonarchOp) or not op.func._schema.is_mutable:
        return False
    written = (op.argument(argument.name) for argument in op.func._schema.arguments if argument.is_write)
    return any(value.root in roots for each in written for value in _values(each))
