"""What ends with a program, in its process and in those of actors.

The library's logs and telemetry do, which those who start and end processes do not know. `monarch` registers it on
import, before torch is loaded: so this module loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable

_at_exit: Callable[[], None] | None = None


def end_with(at_exit: Callable[[], None]) -> None:
    """Register what closes all that this process has open. To call that again changes nothing."""
    global _at_exit
    _at_exit = at_exit


def end() -> None:
    """The program, or a process of its, ends."""
    if _at_exit is not None:
        _at_exit()
