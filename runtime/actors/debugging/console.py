"""Consoles for actors that wait at a breakpoint: in a notebook, or in another terminal over a socket.

A process that connects to the socket, an abstract one that only processes of this network namespace see, has to be the
same user's. The program sends its output, up to a NUL; the console sends a line.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import ActorError, SupervisionError
from monarch.runtime.actors.messages.router import is_ours

if TYPE_CHECKING:
    from monarch.runtime.actors.debugging.debugger import Desk, Stopped

HELP = """\
list                              which actors wait at a breakpoint, and where
attach NAME [RANK]                talk to the debugger of one; `detach` leaves it where it is
cast NAME [RANKS] COMMAND         give a command to several: cast trainer 0,2-5 print(loss)
continue                          let all of them go on
help, quit
"""


class Console:
    """The input and output of a console, line by line."""

    def __init__(self, at: Desk) -> None:
        self._desk = at
        self._attached: tuple[str, int] | None = None

    @property
    def prompt(self) -> str:
        return "monarch> " if self._attached is None else f"{self._attached[0]} {self._attached[1]}> "

    def run(self, line: str) -> str | None:
        """The output for an input line; None where the console is to be left."""
        try:
            if self._attached is not None:
                return self._run_attached(line)
            return self._run(line.split())
        except (ActorError, SupervisionError) as error:  # it is not there any more
            self._attached = None
            return f"{error.exception if isinstance(error, ActorError) else error}\n"

    def _run(self, words: Sequence[str]) -> str | None:
        match list(words):
            case []:
                return ""
            case ["quit" | "q" | "exit"]:
                return None
            case ["list" | "l"]:
                return self._list()
            case ["continue" | "c"]:
                waiting = self._desk.list.call_one().get()
                for stopped in waiting:
                    self._tell(stopped, "continue")
                return f"{len(waiting)} went on\n"
            case ["attach" | "a", name, *rest] if len(rest) < 2:
                found = self._waiting(name, rest[0] if rest else None)
                if len(found) != 1:
                    return self._which(name, found)
                self._attached = found[0].actor, found[0].rank
                return self._tell(found[0], None)
            case ["cast", name, *rest] if rest:
                some = rest[0] if len(rest) > 1 and set(rest[0]) <= set("0123456789,-") else None
                command = " ".join(rest[1:] if some else rest)
                found = self._waiting(name, some)
                if not found:
                    return self._which(name, found)
                return "".join(f"{stopped.actor} {stopped.rank}: {self._tell(stopped, command)}" for stopped in found)
            case ["help" | "h" | "?"]:
                return HELP
        return f"'{' '.join(words)}' is no command\n{HELP}"

    def _run_attached(self, line: str) -> str:
        assert self._attached is not None
        actor, rank = self._attached
        if line.strip() in ("detach", "quit", "q", "exit"):
            self._attached = None
            return ""
        said, waits = self._desk.tell.call_one(actor, rank, line).get()
        if not waits:
            self._attached = None
            return f"{_without_prompt(said)}{actor} {rank} continued\n"
        return _without_prompt(said)

    def _list(self) -> str:
        waiting = self._desk.list.call_one().get()
        return "".join(f"{stopped}\n" for stopped in waiting) or "no actor waits at a breakpoint\n"

    def _waiting(self, name: str, ranks: str | None) -> list[Stopped]:
        wanted = None if ranks is None else _numbers(ranks)
        return [
            stopped
            for stopped in self._desk.list.call_one().get()
            if stopped.actor == name and (wanted is None or stopped.rank in wanted)
        ]

    def _which(self, name: str, found: Sequence[Stopped]) -> str:
        if not found:
            return f"no such actor '{name}' waits at a breakpoint\n{self._list()}"
        return f"which of them: {', '.join(str(stopped.rank) for stopped in found)}?\n"

    def _tell(self, stopped: Stopped, command: str | None) -> str:
        said, _ = self._desk.tell.call_one(stopped.actor, stopped.rank, command).get()
        return _without_prompt(said)


def _without_prompt(said: str) -> str:
    return said.removesuffix("(Pdb) ")


def _numbers(text: str) -> set[int]:
    """0,2-5 as numbers. Other text is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first.isdigit() and (not dash or last.isdigit()):
            found.update(range(int(first), int(last if dash else first) + 1))
    return found


# -- from another terminal ---------------------------------------------------------------------------------------------


def _name(pid: int) -> str:
    return f"\0monarch-debug-{pid}"


def serve_consoles(desk: Callable[[], Desk]) -> None:
    """Let consoles connect to this process, which has the `desk` of the day, as long as it lives."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(_name(os.getpid()))
    except OSError:  # an earlier desk of this process has it, and its consoles ask for the desk of the day
        listener.close()
        return
    listener.listen()

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            if is_ours(connection):
                threading.Thread(target=_serve, args=(connection, desk), name="monarch console", daemon=True).start()
            else:
                connection.close()

    threading.Thread(target=accept, name="monarch consoles", daemon=True).start()


def _serve(connection: socket.socket, desk: Callable[[], Desk]) -> None:
    with connection, suppress(OSError), connection.makefile("r", encoding="utf-8") as lines:
        console = Console(desk())
        connection.sendall(f"{console.prompt}\0".encode())
        for line in lines:
            answer = console.run(line)
            if answer is None:
                return
            connection.sendall(f"{answer}{console.prompt}\0".encode())


def programs() -> list[int]:
    """The processes on this machine that have a desk."""
    names = re.findall(r"@monarch-debug-(\d+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return sorted({int(pid) for pid in names})


def connect(pid: int | None = None) -> None:
    """Be a console of a program, from standard input to standard output. Raises MonarchError where there is none, or
    more than one to choose from."""
    found = programs()
    if pid is None and len(found) != 1:
        if not found:
            raise MonarchError(
                "no program here has actors that stopped at a breakpoint",
                hint="Put breakpoint() into an endpoint, and run the program.",
            )
        raise MonarchError(f"several programs can be debugged: {', '.join(map(str, found))}", hint="Say which.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(_name(found[0] if pid is None else pid))
        except OSError as error:
            raise MonarchError(
                f"process {pid} has no actors that stopped at a breakpoint",
                hint=f"Those that have: {', '.join(map(str, found)) or 'none'}.",
            ) from error
        if not is_ours(connection):
            raise MonarchError(f"process {pid} is another user's")
        with suppress(BrokenPipeError, ConnectionResetError):
            _talk(connection)


def _talk(connection: socket.socket) -> None:
    while True:
        said = b""
        while not said.endswith(b"\0"):
            data = connection.recv(1 << 16)
            if not data:
                return
            said += data
        sys.stdout.write(said[:-1].decode(errors="replace"))
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        connection.sendall(f"{line.rstrip()}\n".encode())
