"""Interrupts at a chosen point of the controller's own code.

Python runs a signal's handler between two bytecodes, and only behind some of them: where a function begins, behind a
call, and where a loop goes back (`CHECK_EVAL_BREAKER` in CPython's ceval.c). These are the points that are counted
here, so that an injected interrupt comes wherever a real one can, and nowhere else.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

OWN = ("/monarch/language/", "/monarch/runtime/controller/", "/monarch/runtime/shared/", "/monarch/runtime/processes/")
"""Parts of the paths whose code counts as the controller's: the code that traces, calls and heals, and not the
compiler."""

_HANDLERS_RUN_BEHIND = frozenset(
    code for name, code in dis.opmap.items() if name == "RESUME" or name.startswith("CALL") or "JUMP_BACKWARD" in name
) - {dis.opmap.get("JUMP_BACKWARD_NO_INTERRUPT")}


def _caught_at(frame: FrameType, offset: int) -> int | None:
    """The handlers of this bytecode's errors. A handler's own error comes from the bytecode behind which it runs: where
    the next one is in no such block, `with lock: return f()` would keep the lock."""
    for entry in _handled(frame.f_code):
        if entry.start <= offset < entry.end:
            return int(entry.target)
    return None


@cache
def _handled(code: CodeType) -> Sequence[Any]:
    return dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]


@dataclass
class Points:
    """`passed`: so many points the code has come to. `where`: the one at which it was interrupted, as "file:line in
    function", or None."""

    passed: int = 0
    where: str | None = None


def ctrl_c() -> None:
    """The default effect of Ctrl-C: raises KeyboardInterrupt."""
    raise KeyboardInterrupt


@contextmanager
def interrupt(at: int, act: Callable[[], object] = ctrl_c, within: Sequence[str] = OWN) -> Iterator[Points]:
    """Do `act` once, as a signal's handler would, when this thread comes to the point number `at` of Monarch's own
    code; with -1, only count the points. `within` are parts of the paths whose code counts.

        with chaos.interrupt(-1) as points:
            train_step(x).item()
        for at in range(points.passed):
            with suppress(KeyboardInterrupt), chaos.interrupt(at):
                train_step(x).item()

    Finalizers do not count: Python drops their errors. The block runs a hundred times slower, and what debuggers and
    coverage set with `sys.settrace` is out of force in it.
    """
    points, codes = Points(), dict[CodeType, bytes | None]()

    def counted(code: CodeType) -> bytes | None:
        """Its bytecodes, where they count."""
        if code not in codes:
            own = code.co_name != "__del__" and any(part in code.co_filename for part in within)
            codes[code] = code.co_code if own else None
        return codes[code]

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        bytecodes = counted(frame.f_code)
        if bytecodes is None:
            return None
        last = frame.f_lasti  # no RESUME where an error is thrown into a generator: no handler runs there

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                before, last = last, frame.f_lasti
                if bytecodes[before] in _HANDLERS_RUN_BEHIND and _caught_at(frame, before) == _caught_at(frame, last):
                    points.passed += 1
                    if points.passed == at + 1:
                        points.where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                        sys.settrace(None)
                        act()
            return trace

        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    found = sys.gettrace()
    sys.settrace(enter)
    try:
        yield points
    finally:
        sys.settrace(found)
