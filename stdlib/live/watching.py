"""A program's activity: `snapshot()`, as plain data for JSON, and `stacks()`. Both read only.

While the watch is on, a step costs it one event; everything else is looked up on request, without taking a mesh's lock.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any

from monarch.compiler.execution.events import Failure, Fault, Span, Status, WorkersStatus, running, subscribe
from monarch.compiler.execution.executor import Executor
from monarch.runtime.actors.processes.looks import look, stacks_of
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.processes.looking import memory_of
from monarch.runtime.processes.looking import stacks as own_stacks
from monarch.stdlib import logs

SECONDS = 120
"""So many seconds of steps are remembered, one number each."""
POINTS = 1000
"""So many points of a curve are remembered; of more, every second one goes."""
_RATE_SECONDS = 5
_FAILURES = 50
_ENDED = 5


class _Mesh:
    """The notes about a mesh of workers."""

    def __init__(self, executor: Executor) -> None:
        self.executor = weakref.ref(executor)
        self.name = str(executor.mesh)
        self.shape = dict(executor.mesh.dims)
        self.first = int(time.monotonic())
        self.steps = 0
        self.program = ""
        self.seconds: deque[list[int]] = deque(maxlen=SECONDS)
        """Pairs of a second, on the monotonic clock, and the steps that were called in it."""
        self.ended = False

    def ran(self, program: str) -> None:
        self.steps += 1
        self.program = program
        second = int(time.monotonic())
        if self.seconds and self.seconds[-1][0] == second:
            self.seconds[-1][1] += 1
        else:
            self.seconds.append([second, 1])

    def show(self) -> dict[str, Any]:
        now = int(time.monotonic())
        counts = {each[0]: each[1] for each in tuple(self.seconds)}
        first = max(self.first, now - SECONDS)
        rates = [counts.get(second, 0) for second in range(first, now)]  # the current second is not over
        executor = self.executor()
        ahead, memory = 0, dict[int, int]()
        if isinstance(executor, MeshExecutor) and not self.ended:
            ahead, memory = executor.look()
        return {
            "name": self.name,
            "shape": self.shape,
            "running": not self.ended,
            "program": self.program,
            "steps": self.steps,
            "rate": sum(rates[-_RATE_SECONDS:]) / max(1, len(rates[-_RATE_SECONDS:])),
            "rates": rates,
            "queue": ahead,
            "memory": list(memory.values()),
        }


class _Curve:
    """Numbers by step, thinned out as they become many."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.last = (0, 0.0)
        self._every, self._skipped = 1, 0

    def add(self, step: int, value: float) -> None:
        self.last = step, value
        self._skipped += 1
        if self._skipped >= self._every or not self.points:
            self._skipped = 0
            self.points.append(self.last)
            if len(self.points) > POINTS:
                self.points, self._every = self.points[::2], 2 * self._every

    def show(self) -> list[tuple[int, float | None]]:
        """The points, up to the last; JSON has no NaN and no infinity."""
        points = self.points if self.points[-1] is self.last else [*self.points, self.last]
        return [(step, value if math.isfinite(value) else None) for step, value in points]


class Watch:
    """Notes what happens, from when it is made until it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meshes: weakref.WeakKeyDictionary[Executor, _Mesh] = weakref.WeakKeyDictionary()
        self._listed: deque[_Mesh] = deque()
        self._curves: dict[str, _Curve] = {}
        self._failures: deque[dict[str, Any]] = deque(maxlen=_FAILURES)
        self._failed = 0
        self._started = time.time()
        self._unsubscribe = [
            subscribe(self._on_span, Span),
            subscribe(self._on_workers, WorkersStatus),
            subscribe(self._on_failure, Failure),
            subscribe(self._on_fault, Fault),
            subscribe(self._on_status, Status),
        ]
        self._log = logs.log_to(self._on_log)
        for executor in running():
            self._mesh(executor)

    def close(self) -> None:
        """Note nothing more. Idempotent."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._log.close()

    def snapshot(self) -> dict[str, Any]:
        """The program's activity now.

        `program`    name, pid, host, seconds since the watch began, memory in bytes
        `meshes`     of workers: name, shape, running, program, steps, rate (a second), rates (the last seconds), queue
                     (commands that the workers have not finished), memory (bytes, by rank)
        `processes`  of actors: name, pid, host, memory (`share_of`), answers, actors (name, class_name, queued,
                     running: endpoints)
        `logs`       by name what `monarch.log` was given: pairs of step and value
        `failures`   the last ones, the newest first: time, what, summary, text
        `failed`     how many there were
        """
        with self._lock:
            curves = {name: each.show() for name, each in self._curves.items()}
            meshes = list(self._listed)
        return {
            "time": time.time(),
            "program": {
                "name": os.path.basename(sys.argv[0]) or "python",
                "pid": os.getpid(),
                "host": os.uname().nodename,
                "seconds": time.time() - self._started,
                "memory": memory_of(os.getpid()),
            },
            "meshes": [mesh.show() for mesh in meshes],
            "processes": look(),
            "logs": curves,
            "failures": list(self._failures)[::-1],
            "failed": self._failed,
        }

    def stacks(self) -> dict[str, str]:
        """The stacks of all threads, by their process: the program, the workers of its meshes, its processes of actors.
        Takes a second or two where a process does not answer."""
        found = {"program": own_stacks()}
        for executor in running():
            if isinstance(executor, MeshExecutor):
                for rank, seen in executor.where().items():
                    found[f"{executor.mesh} worker {rank} (process {seen.pid})"] = seen.stacks or f"state {seen.state}"
        return found | stacks_of()

    # -- events --------------------------------------------------------------------------------------------------------

    def _mesh(self, executor: Executor) -> _Mesh:
        with self._lock:
            found = self._meshes.get(executor)
            if found is None:
                found = self._meshes[executor] = _Mesh(executor)
                self._listed.append(found)
                for gone in [mesh for mesh in self._listed if mesh.ended][:-_ENDED]:
                    self._listed.remove(gone)
            return found

    def _on_span(self, span: Span) -> None:
        if span.kind == "run":
            (self._meshes.get(span.executor) or self._mesh(span.executor)).ran(span.label)

    def _on_workers(self, status: WorkersStatus) -> None:
        self._mesh(status.executor).ended = not status.is_running

    def _on_failure(self, failure: Failure) -> None:
        self._note(str(failure.mesh), failure.error.message, str(failure.error))

    def _on_fault(self, fault: Fault) -> None:
        self._failed += fault.before
        self._note(fault.name, fault.reason.rstrip().rpartition("\n")[2], fault.text)  # a traceback's last line

    def _on_status(self, status: Status) -> None:
        if status.kind == "process" and status.status == "Failed":
            self._note(status.name, status.reason, status.reason)

    def _note(self, what: str, summary: str, text: str) -> None:
        self._failed += 1
        self._failures.append({"time": time.time(), "what": what, "summary": summary, "text": text})

    def _on_log(self, name: str, value: float, step: int) -> None:
        with self._lock:
            self._curves.setdefault(name, _Curve()).add(step, value)


_watch: Watch | None = None
_making = threading.Lock()


def watch() -> Watch:
    """The watch of this program, which begins with the first call."""
    global _watch
    with _making:
        if _watch is None:
            _watch = Watch()
        return _watch


def _after_fork() -> None:
    global _watch, _making
    _watch, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
