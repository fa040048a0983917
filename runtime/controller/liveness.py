"""One thread looks twice a second which worker keeps a mesh from coming further, and whether a mesh has ended while
nobody calls.

A mesh that has work and on which no worker has come further for a while (the setting `stall_warning`) is reported on
standard error: the step, the workers that have not arrived and their stacks, and the workers that wait for them. It is
no error by itself, for ops may take long, and debuggers too. It becomes one where a worker that others wait for was
stopped by a signal and stays so (`stopped_worker_timeout`): then all that wait for the mesh raise its error. A step
does no work for this: workers write their progress to shared memory, as ever, and the thread asks for their stacks only
for a report.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from monarch.compiler.config import settings
from monarch.compiler.plan import MonarchError
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import Step
from monarch.runtime.processes.looking import WorkerProgress

TICK_SECONDS = 0.5
_SHOWN = 4
"""So many of those that have not arrived are shown with their stacks, and so many of those that wait."""


class Watched(Protocol):
    """The part of a `Connection` that this thread watches."""

    state: ControllerState
    lock: threading.RLock
    closing: bool
    told: bool
    """Whether the mesh's end was reported."""

    exact: bool
    """Whether `marks` tells of all that changes."""

    def finished(self) -> int:
        """How many commands all workers have finished. Takes no lock."""

    def asked(self) -> int:
        """How many commands the workers have got, and see. Takes no lock."""

    def marks(self) -> Sequence[int]:
        """How far the workers are. Takes no lock."""

    def seen(self) -> Mapping[int, WorkerProgress]:
        """The workers by rank; those of a host that does not answer are left out."""

    def lose(self, rank: int, how: str) -> None:
        """This worker is the end of the mesh: all waits for the mesh raise this error. Takes no lock: the waiting
        threads may have it."""

    def take_in(self) -> None:
        """Read the workers' messages, without waiting; with the lock held. Raises MonarchError where the mesh ended."""


class Stall:
    """Since when nothing has changed. Pure: its caller gives the time and the workers' progress."""

    def __init__(self, now: float) -> None:
        self.since = self._looked = now
        self.reported: float | None = None
        """When it was reported that nothing changes."""
        self._marks: tuple[int, ...] = ()

    def look(self, now: float, marks: Sequence[int], busy: bool, bound: float) -> bool:
        """Whether that has lasted for so long, and is to be reported now. Time in which this process did not run, as
        after Ctrl-Z, does not count."""
        slept = max(0.0, now - self._looked - 4 * TICK_SECONDS)
        self.since, self._looked = min(now, self.since + slept), now
        if self.reported is not None:
            self.reported = min(now, self.reported + slept)
        if tuple(marks) != self._marks or not busy:
            self._marks, self.since, self.reported = tuple(marks), now, None
        if self.reported is None and now - self.since >= bound:
            self.reported = now
            return True
        return False

    def again(self, now: float) -> None:
        """It has changed after all."""
        self.since, self.reported = now, None


def behind(seen: Mapping[int, WorkerProgress]) -> list[int]:
    """The workers that have not arrived where others are: all, where all are at the same place."""
    least = min((each.done, each.progress >> 1) for each in seen.values())
    return [rank for rank, each in seen.items() if (each.done, each.progress >> 1) == least]


def report(state: ControllerState, step: Step | None, seen: Mapping[int, WorkerProgress], seconds: float) -> str:
    """The workers that keep a mesh from coming further in a step."""
    late = behind(seen) if seen else []
    what = "its work" if step is None else f"step {step.sequence} ('{step.name}')"
    lines = [f"monarch: {what} on {state.mesh} has made no progress for {seconds:.0f} s."]
    for rank in late[:_SHOWN]:
        each = seen[rank]
        lines.append(f"  worker {state.coordinates_of(rank)} (process {each.pid}) has not arrived: {_doing(each)}")
        lines += [f"    {line}" for line in each.stacks.splitlines()]
    if len(late) > _SHOWN:
        lines.append(f"  and {len(late) - _SHOWN} more workers have not arrived")
    waiting = [rank for rank in seen if rank not in late]
    for rank in waiting[:_SHOWN]:
        lines.append(f"  worker {state.coordinates_of(rank)} waits {seen[rank].op}")
    if len(waiting) > _SHOWN:
        lines.append(f"  and {len(waiting) - _SHOWN} more workers wait")
    missing = state.mesh.workers - len(seen)
    if missing:
        lines.append(f"  {missing} workers are on hosts that do not answer")
    return "\n".join(lines) + "\n"


def _doing(each: WorkerProgress) -> str:
    match each.state:
        case "T":
            return f"a signal has stopped it (SIGSTOP, say); kill -CONT {each.pid} resumes it"
        case "t":
            return "a debugger has stopped it"
        case "" | "Z":
            return "its process has ended"
    return f"it is {each.op or 'running'}" if each.stacks else "it does not say where it is"


class Watch:
    """Looks at one mesh."""

    def __init__(self, connection: Watched, now: float) -> None:
        self._connection = connection
        self._stall = Stall(now)
        self._places: dict[int, tuple[int, int]] = {}
        self._died = False

    def look(self, now: float) -> None:
        connection, state = self._connection, self._connection.state
        if connection.closing:
            return
        if connection.lock.acquire(blocking=False):  # otherwise its owner reads replies
            try:
                connection.take_in()
                self._died = False  # or it was healed
            except MonarchError as error:
                self._ended(error)
                return
            finally:
                connection.lock.release()
        finished, asked = connection.finished(), connection.asked()
        step = state.step_of(finished)
        if self._stall.look(now, (asked, *connection.marks()), finished < asked, settings.stall_warning):
            self._report(step, connection.seen(), now)
        elif self._stall.reported is not None and now - self._stall.reported >= settings.stopped_worker_timeout:
            self._lose_stopped(now)

    def _report(self, step: Step | None, seen: Mapping[int, WorkerProgress], now: float) -> None:
        places = {rank: (each.done, each.progress) for rank, each in seen.items()}
        if not self._connection.exact and places != self._places:  # they may have come further within a long step
            self._places = places
            self._stall.again(now)
        else:
            say(report(self._connection.state, step, seen, now - self._stall.since))

    def _lose_stopped(self, now: float) -> None:
        """Where a reported stall lasts, a worker that a signal has stopped is the end of the mesh."""
        connection = self._connection
        seen = connection.seen()
        stopped = [rank for rank in behind(seen) if seen[rank].stopped] if seen else []
        self._stall.reported = now  # look again after as long
        if stopped:
            connection.lose(stopped[0], f"has been stopped by a signal for {now - self._stall.since:.0f} s")

    def _ended(self, error: MonarchError) -> None:
        """Where nobody calls, as during a compile, this reports the end, a moment later."""
        if self._died and not self._connection.told and not self._connection.closing:
            self._connection.told = True
            say(f"monarch: {error.message}\n  What uses the mesh next raises this as DeviceMeshError.\n")
        self._died = True


def say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)  # to nowhere where there is no such stream


_lock = threading.Lock()
_watches: list[tuple[weakref.ref[Watched], Watch]] = []
_thread: threading.Thread | None = None


def watch(connection: Watched) -> None:
    """Look at a mesh from now on, until it is closed."""
    global _thread
    with _lock:
        _watches.append((weakref.ref(connection), Watch(weakref.proxy(connection), time.monotonic())))
        if _thread is None:
            _thread = threading.Thread(target=_serve, name="monarch liveness", daemon=True)
            _thread.start()


def _serve() -> None:
    global _thread
    while True:
        time.sleep(TICK_SECONDS)
        with _lock:
            there = [(ref, each) for ref, each in _watches if (found := ref()) is not None and not found.closing]
            found = None
            _watches[:] = there
            if not there:
                _thread = None
                return
        for _, each in there:
            with suppress(ReferenceError):  # it has just been collected
                each.look(time.monotonic())


def _after_fork() -> None:
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _watches.clear()


os.register_at_fork(after_in_child=_after_fork)
