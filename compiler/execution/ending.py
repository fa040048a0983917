"""Services that end with a program, in its process and in those of actors.

The library's logs and telemetry do, which the code that starts and ends processes does not know. `monarch` registers it
on import, before torch is loaded: so this module loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable

_at_exit: Callable[[], None] | None = None


def end_with(at_exit: Callable[[], None]) -> None:
    """Register what closes all that this process has open. To call that again changes nothing."""
    global _at_exit
    _at_exit = at_exit


_finished: list[Callable[[], None]] = []


def finish_first(wait: Callable[[], None]) -> None:
    """Register what waits for work of this process, in a process of actors before any handler of `atexit`: these may
    end what does the work."""
    _finished.append(wait)


def finish() -> None:
    """Wait for that work."""
    for wait in _finished:
        wait()


def end() -> None:
    """The program, or a process of its, ends."""
    if _at_exit is not None:
        _at_exit()
