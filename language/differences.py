"""What changed between two traces of one program, in the user's terms."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.errors import ProgramError
from monarch.compiler.passes.capture import Number, Op, Value
from monarch.language.trace import Trace


def differ(first: Trace, second: Trace) -> bool:
    """Whether two traces are different programs."""
    return (
        first.key != second.key
        or _python_results(first) != _python_results(second)
        or any(not torch.equal(a, b) for a, b in zip(_constants(first), _constants(second), strict=True))
    )


def difference(first: Trace, second: Trace) -> ProgramError:
    """The error that says what a program had built in and is otherwise now."""
    for was, now in zip(first.tape.ops, second.tape.ops, strict=False):
        if was.key != now.key:
            return _ops_differ(was, now)
    if len(first.tape.ops) != len(second.tape.ops):
        longer, when = (first, "when it was traced") if len(first.tape.ops) > len(second.tape.ops) else (second, "now")
        extra = longer.tape.ops[min(len(first.tape.ops), len(second.tape.ops))]
        return ProgramError(
            f"the program ran {len(first.tape.ops)} ops when it was traced and runs {len(second.tape.ops)} now",
            hint=f"this one runs only {when}: {_name(extra)}.\n{_TRACED_ONCE}",
            source=extra.source,
        )
    for a, b in zip(_constants(first), _constants(second), strict=False):
        if a.shape != b.shape or not torch.equal(a, b):
            return ProgramError(
                f"a plain tensor of shape {list(b.shape)} that the program builds in has other values now",
                hint="place it on the mesh with monarch.distribute, or pass it as an argument.",
            )
    for was, now in zip(_python_results(first), _python_results(second), strict=False):
        if was != now:
            return ProgramError(
                f"the program returned {was!r} when it was traced and returns {now!r} now",
                hint="Python values that a program returns are those of its trace. Return tensors.",
            )
    return ProgramError("the program is not what it was when it was traced", hint=_TRACED_ONCE)


_TRACED_ONCE = "A program is traced once; Python values in it are built in: pass what changes as an argument."


def _ops_differ(was: Op, now: Op) -> ProgramError:
    if was.func is now.func:
        for a, b in zip(_numbers((was.args, was.kwargs)), _numbers((now.args, now.kwargs)), strict=False):
            if a != b:
                return ProgramError(
                    f"this value was {_plain(a)} when the program was traced and is {_plain(b)} now: "
                    "pass it as an argument",
                    hint=f"in {_name(now)}. Python values are built into a program; floats among its arguments are "
                    "given anew at every call.",
                    source=now.source,
                )
        return ProgramError(
            f"{_name(now)} works on other tensors now than when the program was traced",
            hint=_TRACED_ONCE,
            source=now.source,
        )
    return ProgramError(
        f"this line runs {_name(now)} now and ran {_name(was)} when the program was traced",
        hint=_TRACED_ONCE,
        source=now.source,
    )


def _name(op: Op) -> str:
    return str(op.func)


def _numbers(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [leaf for entry in tree for leaf in _numbers(entry)]
    return [] if isinstance(tree, Value) else [tree]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Number) else value


def _constants(trace: Trace) -> list[torch.Tensor]:
    return [entry.tensor for entry in trace.tape.inputs if entry.tensor is not None]


def _python_results(trace: Trace) -> list[Any]:
    """The results that are plain Python values: those that can be compared."""
    return [leaf for leaf in trace.result.leaves if leaf is None or isinstance(leaf, (bool, int, float, str, bytes))]
