"""Modules that start processes while they are imported.

Where a process that was started for another imports such a module, to have a class or a function of it, it would start
processes too, and each of these again, without an end.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from monarch.compiler.plan import MonarchError, Source

_above = 0
"""How many processes are above this one that were started for one another: 0 in the user's own."""


def started(above: int | None = None) -> None:
    """This process was started for another one, by a fork of it; or anew, so many below the user's own."""
    global _above
    _above = _above + 1 if above is None else above


def above() -> int:
    """How far below the user's own process this one was started."""
    return _above


def refuse_while_importing(most: int) -> None:
    """Processes are about to be started. Raises MonarchError, with the line, where that is done by a module that is
    being imported, in a process that is further below the user's own than `most`."""
    if _above <= most:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            spec: Any = frame.f_globals.get("__spec__")
            if getattr(spec, "_initializing", False):
                raise MonarchError(
                    f"the module {spec.name} starts processes while it is imported: a process that was started for "
                    "another imports it too, and would start more of them",
                    hint="start them in a function that the program calls, or move the classes and functions that are "
                    "sent to a module that starts none.",
                    source=Source(frame.f_code.co_filename, frame.f_lineno),
                )
        frame = frame.f_back
