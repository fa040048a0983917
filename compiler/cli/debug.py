"""`monarch debug`: attach to actors that wait at a `breakpoint()`."""

from __future__ import annotations

from typing import Annotated

import typer


def debug(
    pid: Annotated[
        int | None, typer.Argument(metavar="[PID]", help="The program's process. [the only one with such actors]")
    ] = None,
) -> None:
    """Attach to actors that wait at a breakpoint, of a program that runs on this machine.

    Commands: list, attach NAME [RANK], cast NAME [RANKS] COMMAND, continue, help, quit. An attached actor takes the
    commands of Python's debugger; detach leaves it where it is.
    """
    from monarch.runtime.actors.debugging.console import connect

    connect(pid)
