"""The output of workers: passed on as it comes, and its end kept, so that an error can show a dead worker's last lines.

All workers of a warm parent write to two sockets, one in place of standard output and one of standard error. The kernel
notes with each write which process made it (SO_PASSCRED), so two descriptors serve any number of workers, and the
output of a killed worker is in the socket. Only the warm parent reads: a worker needs no thread for it.
"""

from __future__ import annotations

import faulthandler
import os
import select
import socket
import struct
import sys
from contextlib import suppress

LAST_LINES, LAST_BYTES = 20, 4 << 10
"""So many bytes of a worker's last output are kept."""

_CHUNK = 4096  # as much as a pipe that poll calls writable takes without blocking
_AT_ONCE = 1024
"""So many chunks are moved before the warm parent looks at other things: more than the sockets hold."""
_CREDENTIALS = struct.Struct("=iii")


def flush_streams() -> None:
    """Write out what this process has printed, where it can print at all."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # there is none, or the program has closed it
            stream.flush()


def open_standard_files() -> None:
    """Have 0, 1 and 2 be open in a program that was started without (`<&- >&-`): what is opened next would have their
    numbers, and what processes print would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one


def renew_streams() -> None:
    """Have this process, and those that are forked from it, print line by line to what 1 and 2 stand for by then, and a
    crash say where it was. Before the forks: in each of them it would copy pages."""
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    faulthandler.enable(2, all_threads=False)


class _Stream:
    """One of the two: where workers write, and where that goes."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.source, self.workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.source.setblocking(False)
        self.source.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.waiting = b""
        """Bytes that were read, and that the target has not taken yet."""


class Output:
    """The output of the processes that this one forks. Nothing here blocks: where the target takes nothing (a terminal
    that is stopped), workers that print wait, and no other process."""

    def __init__(self) -> None:
        self._streams = [_Stream(1), _Stream(2)]
        self._last: dict[int, bytes] = {}

    @property
    def files(self) -> list[int]:
        """All descriptors of this object, for a forked process to close."""
        return [end.fileno() for each in self._streams for end in (each.source, each.workers)]

    def become(self) -> None:
        """In a process just forked: print to the sockets from now on."""
        for each in self._streams:
            os.dup2(each.workers.fileno(), each.target)

    def watch(self, pid: int) -> None:
        """Keep the end of this process's output."""
        self._last[pid] = b""

    def waits_for(self) -> dict[int, int]:
        """The descriptors, and of each the event, at which `move` has something to do next."""
        return dict(
            (each.target, select.POLLOUT) if each.waiting else (each.source.fileno(), select.POLLIN)
            for each in self._streams
        )

    def move(self) -> None:
        """Pass on some of the output, as far as the targets take it."""
        for each in self._streams:
            for _ in range(_AT_ONCE):
                if not (each.waiting or self._read(each)) or not _takes(each.target):
                    break
                part = each.waiting[:_CHUNK]
                try:
                    os.write(each.target, part)
                except OSError:  # nobody reads it any more
                    part = each.waiting
                each.waiting = each.waiting[len(part) :]

    def take(self, pid: int) -> str:
        """The last lines of a process that has ended. Asked for once."""
        for each in self._streams:
            for _ in range(_AT_ONCE):
                if not self._read(each):
                    break
        self.move()
        lines = self._last.pop(pid, b"").decode(errors="replace").splitlines()
        return "\n".join(lines[-LAST_LINES:])

    def _read(self, stream: _Stream) -> bool:
        """Take in what one process has written; False where there is nothing."""
        try:
            data, notes, _, _ = stream.source.recvmsg(_CHUNK, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return False
        stream.waiting += data
        for level, kind, note in notes:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid = _CREDENTIALS.unpack(note)[0]
                if pid in self._last:
                    self._last[pid] = (self._last[pid] + data)[-LAST_BYTES:]
        return bool(data)


def _takes(target: int) -> bool:
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    return bool(poll.poll(0))
