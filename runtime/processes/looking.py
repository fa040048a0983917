"""The state of a process and the stacks of its threads, seen from another process of the same user.

A process that can be asked (`answer_with`) writes its answer into an anonymous file of its own, which the asking
process finds among its open files; two signals ask for it:

    ASK     Python answers, in the main thread, which has to run some of it
    DUMP    faulthandler writes the stacks, whatever the process does: also while C code keeps Python's lock

A third, STOP, has a worker look whether it is to give up its step. These signals would end a process that does not
expect them, so they are sent only to those that do.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import format_stack, walk_stack
from types import FrameType
from typing import NamedTuple, Protocol

ASK, DUMP, STOP = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6, signal.SIGRTMIN + 7
_NAME = "monarch-stacks"
_END = "\n-- that was all --\n"
_ASK_SECONDS, _DUMP_SECONDS, _LOOK_SECONDS = 1.0, 0.3, 0.01


@dataclass(frozen=True)
class WorkerProgress:
    """A worker: its process, how many commands it has finished and how far it is in the next one (`shared.signals`),
    the process' state, and the stacks of its threads ("" where it cannot answer)."""

    pid: int
    done: int
    progress: int
    state: str
    stacks: str

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state == "T"

    @property
    def op(self) -> str:
        """The op that it is in, such as "in all_reduce (train.py:12)"."""
        head = next((line for line in self.stacks.splitlines() if line.startswith("thread 'worker")), "")
        return head.partition("': ")[2]


class Exit(NamedTuple):
    """The end of a worker: its rank, how, as the rest of a sentence, its exit status (negative: a signal) where that is
    known, and the last lines that it printed."""

    rank: int
    how: str
    status: int | None = None
    log: str = ""


class Running(Protocol):
    """Something that runs in Python frames of its own, such as a plan."""

    def where(self, frame: FrameType) -> str:
        """Where in it a frame is, in words; "" if the frame is none of its own."""


running: weakref.WeakSet[Running] = weakref.WeakSet()
"""Of this process."""


def stacks() -> str:
    """The stacks of this process, but for the running thread: a line for each thread, such as "thread 'worker 0': in
    all_reduce (train.py:12)", and below it its frames."""
    frames, text = sys._current_frames(), []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            where = next(filter(None, (each.where(at) for at, _ in walk_stack(frame) for each in list(running))), "")
            text.append(f"thread '{thread.name}'{where and ': ' + where}\n{''.join(format_stack(frame))}")
    return "".join(text)


def answer_with(describe: Callable[[], str]) -> None:
    """Have this process answer with the text of `describe`. In its main thread."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # a file that was emptied is written from its start
    signal.signal(ASK, lambda *_: os.write(fd, (describe() + _END).encode()) and None)
    faulthandler.register(DUMP, file=fd, all_threads=True)


stopping: list[int] = []
"""Not empty where this process was asked to check whether it has to give up its step. Code between two instructions of
a plan can read that at next to no cost."""


def listen_to_stops() -> None:
    """Have this process take STOP. In its main thread."""
    signal.signal(STOP, lambda *_: stopping.append(1))


def stop(pid: int) -> None:
    """Ask a process to check whether it has to give up its step, if it takes STOP."""
    try:
        if _caught(pid) >> (STOP - 1) & 1:
            os.kill(pid, STOP)
    except (OSError, IndexError):  # it has ended
        pass


def _caught(pid: int) -> int:
    """The signals that a process has handlers for, as bits. Raises OSError and IndexError where there is none."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16)


def state_of(pid: int) -> str:
    """The state that Linux shows for a process: "R" and "S" run or wait, "T" is stopped by a signal, "t" by a debugger,
    "Z" has ended; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def memory_of(pid: int) -> int:
    """The bytes of memory that a process of this host holds, shared ones included; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def share_of(pid: int) -> int:
    """The bytes of memory that a process has for itself, and its share of the memory that it has together with others,
    as Linux counts it (PSS): those of several processes add up. Takes a millisecond or more. `memory_of` where Linux
    does not say."""
    try:
        said = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(said.partition("\nPss:")[2].split()[0]) << 10
    except (OSError, IndexError):
        return memory_of(pid)


def where_is(pid: int) -> str:
    """The answer of a process, or its stacks; "" where it cannot be asked. Waits about a second at most."""
    try:
        caught = _caught(pid)
        found = next(fd for fd in os.listdir(f"/proc/{pid}/fd") if _NAME in os.readlink(f"/proc/{pid}/fd/{fd}"))
        file = os.open(f"/proc/{pid}/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
    except (OSError, StopIteration, IndexError):
        return ""
    try:
        for number, seconds in ((ASK, _ASK_SECONDS), (DUMP, _DUMP_SECONDS)):
            if not caught >> (number - 1) & 1:
                continue
            os.ftruncate(file, 0)
            os.kill(pid, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
                if text.endswith(_END):
                    return text.removesuffix(_END)
                time.sleep(_LOOK_SECONDS)
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").strip("\0")
    except OSError:  # it has ended
        return ""
    finally:
        os.close(file)
