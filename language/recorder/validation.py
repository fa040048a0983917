"""Checks of values that only raise, in programs: the workers make them, and a step that does not pass fails whole.

    if not torch.isfinite(loss): raise ValueError(...)
    assert (labels >= 0).all()
    torch.distributions.Normal(loc, scale)      # the scale has to be positive

Python asks such a tensor for its truth while the program is traced. Where one answer only leads to a `raise`, the trace
goes on with the other, and a `check` is recorded. A `raise` that the program itself would catch is a branch like any
other.
"""

from __future__ import annotations

import builtins
import dis
import linecache
import sys
from types import FrameType
from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.errors import check_words
from monarch.compiler.ops.record import enter
from monarch.language.recorder.recording import recording_for
from monarch.language.recorder.varying import varying_together
from monarch.language.source import belongs_to_user
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

_ACTS = ("STORE_GLOBAL", "STORE_NAME", "STORE_ATTR", "STORE_SUBSCR", "STORE_DEREF", "DELETE", "YIELD", "RETURN", "SEND")
_CONSTRAINTS, _DISTRIBUTIONS = "torch/distributions/constraints.py", "torch/distributions/distribution.py"


def check(tensor: torch.Tensor, valid: torch.Tensor, message: str) -> DistributedTensor:
    """The tensor, if all of `valid`, which broadcasts to its shape, are true: else the step fails, with the message."""
    valid = valid.expand(tensor.shape)
    assert isinstance(tensor, DistributedTensor) and isinstance(valid, DistributedTensor)
    recording = recording_for(tensor.mesh)
    values = recording.value_of(tensor._ref), recording.value_of(valid._ref)
    varying = varying_together([tensor, valid])
    return recording.own(ops.check, (*values, message), tuple(tensor.shape), tensor.dtype, varying)


def deferred(tensor: DistributedTensor) -> bool | None:
    """The truth of a tensor that a program asks for, where the program goes on with only one answer: the workers check
    that it is the right one. None where it goes on with both."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    if frame is None:
        return None
    kind: type[BaseException] | None = None
    if frame.f_code.co_filename.endswith(_CONSTRAINTS):
        goes_on: bool | None = True  # a value that does not satisfy the first part of a constraint does not satisfy it
    else:
        goes_on, kind = _goes_on(frame)
    if goes_on is None:
        return None
    with torch.no_grad():
        truth = tensor.detach() != 0
        check(tensor.detach(), truth if goes_on else truth.logical_not(), check_words(kind, _words(frame)))
    return goes_on


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("monarch.language.")


def _goes_on(frame: FrameType) -> tuple[bool | None, type[BaseException] | None]:
    """The outcome of the test that a frame is about to make without which it raises, and which exception; None where
    both go on."""
    steps = [step for step in dis.get_instructions(frame.f_code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    at = next(number for number, step in enumerate(steps) if step.offset >= frame.f_lasti)
    at += steps[at].opname == "TO_BOOL"
    jump = steps[at]
    if "POP_JUMP" not in jump.opname or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None, None
    jumps_if = jump.opname.endswith("IF_TRUE")
    target = next(number for number, step in enumerate(steps) if step.offset >= jump.argval)
    for start, outcome in ((target, jumps_if), (at + 1, not jumps_if)):
        raised = _raise_at(steps, start)
        if raised is not None:
            kind = _named(frame, steps[start:])
            return (None if _caught(frame, raised, kind) else not outcome), kind
    return None, None


def _raise_at(steps: list[dis.Instruction], start: int) -> int | None:
    """Where code from here on raises, if it does nothing before."""
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return step.offset
        if "JUMP" in step.opname or step.opname.startswith(_ACTS) or step.opname == "FOR_ITER":
            return None
    return None


def _named(frame: FrameType, steps: list[dis.Instruction]) -> type[BaseException] | None:
    """The exception that code names first; None where that is not known."""
    for number, step in enumerate(steps):
        found: Any = AssertionError if step.opname == "LOAD_ASSERTION_ERROR" else None
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = frame.f_globals.get(step.argval, getattr(builtins, step.argval, None))
            for attribute in steps[number + 1 :]:
                if attribute.opname != "LOAD_ATTR":
                    break
                found = getattr(found, attribute.argval, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
        if step.opname == "RAISE_VARARGS":
            break
    return None


def _caught(frame: FrameType, offset: int, kind: type[BaseException] | None) -> bool:
    """Whether the user's code may catch the errors raised there."""
    at: FrameType | None = frame
    while at is not None and not (at.f_code.co_name == "trace" and _is_ours(at)):
        if belongs_to_user(at.f_code) and _catches(at, offset, kind):
            return True
        at = at.f_back
        offset = at.f_lasti if at is not None else 0
    return False


def _catches(frame: FrameType, offset: int, kind: type[BaseException] | None) -> bool:
    entries = dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]
    steps = list(dis.get_instructions(frame.f_code))
    while (entry := next((each for each in entries if each.start <= offset < each.end), None)) is not None:
        clause, rest = [], [step for step in steps if step.offset >= entry.target]
        while rest and (step := rest.pop(0)).opname not in ("RERAISE", "WITH_EXCEPT_START"):
            clause.append(step)
            ends = step.opname == "POP_EXCEPT" and (not rest or rest[0].opname != "RERAISE")
            if ends or step.opname in ("CHECK_EG_MATCH", "BUILD_TUPLE"):
                return True
            if step.opname == "CHECK_EXC_MATCH":
                caught = _named(frame, clause)
                if kind is None or caught is None or issubclass(kind, caught):
                    return True
                otherwise = rest[0].argval  # the next clause
                clause, rest = [], [step for step in rest if step.offset >= otherwise]
        offset = entry.target
    return False


def _words(frame: FrameType) -> str:
    """The message of a failed check."""
    known = frame.f_locals
    owner = type(known.get("self")).__name__
    if frame.f_code.co_filename.endswith(_DISTRIBUTIONS):
        if "constraint" in known:
            return f"parameter {known['param']} of {owner} has to satisfy {_constraint(known['constraint'])}"
        if "support" in known:
            return f"a value has to be in the support of {owner}, {_constraint(known['support'])}"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"values that do not pass `{line}`" if line else "values that do not pass a check of the program's"


def _constraint(constraint: Any) -> str:
    """A constraint of a distribution, with its bounds where they are plain numbers."""
    bounds = (f"{name}={bound}" for name, bound in vars(constraint).items() if isinstance(bound, (int, float)))
    return f"{type(constraint).__name__.lstrip('_')}({', '.join(bounds)})"


# -- checks of PyTorch's own -------------------------------------------------------------------------------------------


def _all_true(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].all()


def _any_true(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].any()


def _solved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """After a factorization: `info` is 0 where there is one."""
    info, name, *_ = args
    check(info, info == 0, f"{name}: the factorization cannot be completed, as the input is singular, or not positive")


enter((aten._is_all_true,), record=_all_true)
enter((aten._is_any_true,), record=_any_true)
enter((aten._linalg_check_errors,), record=_solved)
