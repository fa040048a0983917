"""Code that a program cannot contain ends its trace, also where the program's own code catches the error.

    try:
        scale = 1.0 if loss.item() > 10 else 0.1    # in PyTorch this raises nothing
    except Exception:
        scale = 0.0                                 # so here is a way that the program does not take

The first refusal is noted, whoever catches it, and is what the trace raises. Until then the code that has caught it
runs on; the next op that it records, or the next refusal, raises `Ended`, which a handler of Exception lets pass.
A handler of any exception (`except:`), in a loop, would go on for ever: from some number of them on, each line of the
program's own that begins raises, those of the handler among them.
Errors that PyTorch raises too (`OperatorError`), and those of layouts, which the same code has outside of programs, are
the code's own to catch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from monarch.compiler.errors import LayoutError, MonarchError, notice_with
from monarch.language.errors import OperatorError
from monarch.language.recorder.recording import current

E = TypeVar("E", bound=MonarchError)


_PATIENCE = 100
"""So many refusals behind the first one may be caught."""
_OTHERS = ("monarch.", "torch.", "contextlib")
"""Modules whose lines do not raise: they clean up where they catch anything."""


class Ended(BaseException):
    """A trace goes on that has been refused."""

    def __init__(self) -> None:
        current.ends += 1
        self._again()

    def __del__(self) -> None:  # it was caught, and its handler has come to its end
        self._again()

    def _again(self) -> None:
        if current.ends > _PATIENCE and current.refused is not None:
            _end_at_lines(sys._getframe(2))


def _end_at_lines(frame: FrameType | None) -> None:
    """Have each line that begins from here on raise. Python ends that with the first that does."""
    sys.settrace(_enter)
    while frame is not None and frame.f_globals.get("__name__") != "monarch.language.programs.trace":
        if frame.f_trace is None and _enter(frame, "call", None) is not None:
            frame.f_trace = _raise_at_line
        frame = frame.f_back


def _enter(frame: FrameType, event: str, argument: Any) -> Any:
    return None if frame.f_globals.get("__name__", "").startswith(_OTHERS) else _raise_at_line


def _raise_at_line(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line" and current.refused is not None:
        raise Ended
    return _raise_at_line


def refuse(error: E) -> E:
    """The error, which ends the trace of the program that this thread traces, if it traces one."""
    if current.recording is not None:
        if current.refused is not None and current.refused is not error:
            raise Ended
        current.refused = error
    return error


@contextmanager
def asking() -> Iterator[None]:
    """Have errors that are made here refuse nothing: the caller catches them, and they are the answer."""
    before, current.recording = current.recording, None
    try:
        yield
    finally:
        current.recording = before


def check_refused() -> None:
    """Raise where what runs now has been refused."""
    if current.refused is not None and current.recording is not None:
        raise Ended


def _notice(error: MonarchError) -> None:
    if current.recording is not None and not isinstance(error, (OperatorError, LayoutError)):
        refuse(error)


notice_with(_notice)
