"""`monarch debug`: attach to actors that wait at a `breakpoint()`."""

from __future__ import annotations

from monarch.runtime.actors.debugging.console import connect


def debug(pid: int | None) -> None:
    """Attach to the actors of a process."""
    connect(pid)
