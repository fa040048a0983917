"""The stacks of processes' threads and tasks, on request, and when a call takes too long."""

from __future__ import annotations

import asyncio
import io
import math
import sys
import threading
import traceback
from collections.abc import Iterable
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from monarch.compiler.config import settings
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.messages.message import EMPTY
from monarch.runtime.actors.messages.protocol import STACKS
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.ports import One, Pending, failing

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.process import Process

_LOOK_SECONDS = 30.0
_QUIET_SECONDS = 30.0
ANSWER_SECONDS = 5.0
"""How long a process may take to say where it is. It cannot while code keeps Python's lock."""


def stacks_here(process: Process) -> str:
    """The stacks of this process: a thread for each actor, the tasks of each event loop, and the other threads."""
    text = io.StringIO()
    frames = sys._current_frames()
    # A spawned process' main thread serves its sockets, below frames that it has from the process it was forked from.
    own = {threading.current_thread(), *([] if process.host is not None else [threading.main_thread()])}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread in own:
            continue
        text.write(f"thread '{thread.name}':\n")
        text.writelines(traceback.format_stack(frame))
    for actor in list(process.actors.values()):
        for task in [] if actor.loop is None else _tasks(actor.loop):
            text.write(f"task '{task.get_name()}' of '{actor.instance.label}':\n")
            text.writelines(traceback.format_list(_waits(task)))
    return text.getvalue()


def stack_of(thread: threading.Thread, loop: asyncio.AbstractEventLoop | None) -> str:
    """Where an actor is: the tasks of its event loop, or its thread."""
    if loop is not None and (tasks := _tasks(loop)):
        return "".join(line for task in tasks for line in traceback.format_list(_waits(task)))
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _waits(task: asyncio.Task[object]) -> list[traceback.FrameSummary]:
    """Where a task waits: the coroutines that await one another, the outermost first."""
    summary: list[traceback.FrameSummary] = []
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        summary += traceback.extract_stack(frame, limit=1)
        awaited = getattr(awaited, "cr_await", None)
    return summary


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterable[asyncio.Task[object]]:
    return [] if loop.is_closed() else asyncio.all_tasks(loop)


def ask(process: Process, address: str) -> One[str]:
    """Ask a process for its stacks."""
    waiting: One[str] = One(address)
    port = process.ports.open(waiting)
    if not process.router.send(address, (STACKS, (process.address, port, 0)), EMPTY):
        waiting.take(0, False, failing(process.lost(address, "stacks")))
        process.ports.close(port)
    return waiting


class SlowCalls:
    """Prints where the processes are that have not answered a call, once for each call that takes too long; and where
    an actor here is whose `__supervise__` does, for nobody may wait for that."""

    def __init__(self, process: Process) -> None:
        self.seconds: float | None = None
        """The seconds given to `report_slow_calls`; without them the setting `slow_call_warning` counts."""
        self._process = process
        self._reported: set[int] = set()
        self._supervising: dict[str, float] = {}
        """The actors that were reported, by their ids, and since when each deals with a failure."""
        self._rounds = count()
        self._round = 0

    def report_after(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._process.router.soon(self.watch)

    def watch(self) -> None:
        """Look now, and again and again. In the I/O thread."""
        self._round = next(self._rounds)
        self._look(self._round)

    def _look(self, number: int) -> None:
        if number != self._round:  # the time has been changed since
            return
        seconds = settings.slow_call_warning if self.seconds is None else self.seconds
        before = monotonic() - seconds
        calls = self._process.ports.calls()
        self._reported &= calls.keys()
        slow = [at for at, call in calls.items() if call.since <= before and at not in self._reported]
        if slow:
            self._reported.update(slow)
            report = [calls[at] for at in slow]
            threading.Thread(target=self._print, args=(report,), name="monarch slow calls", daemon=True).start()
        for id, actor in list(self._process.actors.items()):
            failure, since = actor.supervises or (None, monotonic())
            if since <= before and self._supervising.get(id) != since:
                self._supervising[id] = since
                sys.stderr.write(
                    f"monarch: __supervise__ of '{actor.instance.label}' has dealt for {monotonic() - since:.1f} s with"
                    f" {failure}\n{actor.where()}"
                )
                sys.stderr.flush()
        self._process.router.later(min(seconds / 4, _LOOK_SECONDS), lambda: self._look(number))

    def _print(self, calls: list[Pending]) -> None:
        for call in calls:
            sys.stderr.write(self._report(call))
            sys.stderr.flush()

    def _report(self, call: Pending) -> str:
        places = call.pending()
        lines = [f"monarch: {call.what} has not been answered after {monotonic() - call.since:.1f} s by:"]
        asked = {address: ask(self._process, address) for address in dict.fromkeys(places.values())}
        for address, answer in asked.items():
            ranks = ", ".join(str(place) for place, at in places.items() if at == address)
            try:
                stacks = answer.future.get(ANSWER_SECONDS)
            except TimeoutError:
                stacks = f"no answer within {ANSWER_SECONDS:g} s: stopped, or in code that keeps the GIL\n"
            except MonarchError as error:
                stacks = f"{error}\n"
            lines += [f"  place {ranks}", *(f"    {line}" for line in stacks.splitlines())]
        return "\n".join(lines) + "\n"


def quiet_seconds() -> float:
    """How long a call of this process may wait for news that need not come, so that it is not reported as slow."""
    seconds = current.process().slow_calls
    return min(_QUIET_SECONDS, (settings.slow_call_warning if seconds is None else seconds) / 2)


def report_slow_calls(seconds: float | None) -> None:
    """Print, to standard error, the stacks of every process that has not answered a call within so many seconds: other
    than the setting `slow_call_warning` says.

    Holds for the calls of this process, and of those that it spawns from now on. None: no more. It costs nothing but a
    look at the open calls now and then. Raises ValueError for a number that is not above 0.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"a bound is a number of seconds above 0, or None, not {seconds!r}")
    current.process().report_calls_after(math.inf if seconds is None else seconds)
