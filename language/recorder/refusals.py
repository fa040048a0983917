"""What a program cannot contain ends its trace, also where the program's own code catches the error.

    try:
        scale = 1.0 if loss.item() > 10 else 0.1    # in PyTorch this raises nothing
    except Exception:
        scale = 0.0                                 # so here is a way that the program does not take

The first refusal is noted, whoever catches it, and is what the trace raises. Until then the code that has caught it
runs on; the next op that it records, or the next refusal, raises `Ended`, which a handler of Exception lets pass.
Errors that PyTorch raises too (`OperatorError`), and those of layouts, which the same code has outside of programs, are
the code's own to catch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from monarch.compiler.errors import LayoutError, MonarchError, notice_with
from monarch.language.errors import OperatorError
from monarch.language.recorder.recording import current

E = TypeVar("E", bound=MonarchError)


class Ended(BaseException):
    """A trace goes on that has been refused."""


def refuse(error: E) -> E:
    """The error, which ends the trace of the program that this thread traces, if it traces one."""
    if current.recording is not None:
        if current.refused is not None and current.refused is not error:
            raise Ended
        current.refused = error
    return error


@contextmanager
def asking() -> Iterator[None]:
    """Have errors that are made here refuse nothing: whoever asks catches them, and they are the answer."""
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
