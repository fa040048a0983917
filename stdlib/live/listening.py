"""A program that is watched answers other processes of its user: `monarch dashboard` and `monarch top`.

It listens on a socket named after its process, in a folder that nobody else may enter: `/run/user/UID/monarch`, or
`monarch-UID` in the folder for temporary files where there is none. A process that connects has to be the same user's
all the same.

    asks       snapshot | stacks, and a line's end
    answer     JSON, to the end
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.messages.router import is_ours

SECONDS = 30.0
"""How long an answer may take: stacks of processes that do not answer take a while."""

Answers = Mapping[str, Callable[[], Any]]


def folder() -> Path:
    """The folder of this user's sockets, which is made where there is none. Raises MonarchError where somebody else
    could enter it."""
    uid = os.geteuid()
    home = Path(f"/run/user/{uid}")
    path = home / "monarch" if os.access(home, os.W_OK) else Path(tempfile.gettempdir()) / f"monarch-{uid}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise MonarchError(f"others may enter {path}, or it is no folder of yours", hint="remove it, or chmod 700.")
    return path


def listen(answers: Answers) -> Path:
    """Answer all that ask, until the program ends; the socket's path. Raises MonarchError where that cannot be made."""
    path = folder() / f"{os.getpid()}.sock"
    path.unlink(missing_ok=True)  # of a process that had this number
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise MonarchError(f"cannot listen at {path}: {error}") from error
    listener.listen()
    owner = os.getpid()
    atexit.register(lambda: path.unlink(missing_ok=True) if os.getpid() == owner else None)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, answers), name="monarch live", daemon=True).start()

    threading.Thread(target=accept, name="monarch live", daemon=True).start()
    return path


def _answer(connection: socket.socket, answers: Answers) -> None:
    with connection, suppress(OSError):
        if not is_ours(connection):
            return
        connection.settimeout(SECONDS)
        with connection.makefile("r", encoding="utf-8") as lines:
            asked = lines.readline(64).strip()
        if asked in answers:
            connection.sendall(json.dumps(answers[asked]()).encode())


def programs() -> list[int]:
    """The processes of this user that answer, by number. Files of killed processes are removed."""
    found = []
    for path in folder().glob("*.sock"):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(str(path))
            found.append(int(path.stem))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue
    return sorted(found)


def choose(pid: int | None) -> int:
    """The program that is meant: `pid`, or the only one. Raises MonarchError where there is none, or several."""
    found = programs()
    if pid is None and len(found) == 1:
        return found[0]
    if pid in found:
        return pid
    hint = "a program can be seen once it calls monarch.dashboard(), or where MONARCH_LIVE=1 is set."
    if not found:
        raise MonarchError("no program of yours can be seen on this machine", hint=hint)
    listed = ", ".join(map(str, found))
    if pid is None:
        raise MonarchError(f"several programs can be seen: {listed}", hint="say which, by its process number.")
    raise MonarchError(f"process {pid} cannot be seen; those that can: {listed}", hint=hint)


def ask(pid: int, what: str) -> Any:
    """Ask a program for its "snapshot" or "stacks". Raises MonarchError where it has ended, or does not answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(folder() / f"{pid}.sock"))
            connection.sendall(f"{what}\n".encode())
            data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return json.loads(data)
    except (OSError, ValueError) as error:
        raise MonarchError(f"process {pid} does not answer: it may have ended") from error
