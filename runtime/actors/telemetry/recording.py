"""Recording in a process: its events as rows of `tables`, handed on twice a second.

An event costs the thread in which it happens one append; a thread of its own hands the rows on. Between two turns a
table takes `MOST` rows at most; of more than these the newest are recorded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from monarch.compiler.execution.events import (
    Failure,
    Handled,
    Metric,
    Span,
    Spawned,
    Status,
    Timed,
    WorkersStatus,
    running,
    subscribe,
)
from monarch.compiler.execution.executor import Executor
from monarch.runtime.actors.telemetry.tables import TABLES, Row, Rows

MOST = 50_000
_SECONDS = 0.5


@dataclass(frozen=True)
class Bounds:
    """The bound of a host's store: so many bytes at most, of the last so many seconds (0: however old)."""

    memory: int
    seconds: float


class Recording:
    """Records the events of this process until it is stopped. `flush` is for any thread."""

    def __init__(self, bounds: Bounds, give: Callable[[Rows], object]) -> None:
        self.bounds = bounds
        self._give = give
        self._rows: dict[str, deque[Row]] = {table: deque(maxlen=MOST) for table in TABLES}
        self._flushing = threading.Lock()
        self._ended = threading.Event()
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._meshes: weakref.WeakKeyDictionary[Executor, str] = weakref.WeakKeyDictionary()
        self._numbers = count(1)
        self._unsubscribe = [
            subscribe(self._on_span, Span),
            subscribe(self._on_workers, WorkersStatus),
            subscribe(self._on_failure, Failure),
            subscribe(self._on_spawned, Spawned),
            subscribe(self._on_status, Status),
            subscribe(self._on_handled, Handled),
            subscribe(self._on_timed, Timed),
            subscribe(self._on_metric, Metric),
        ]
        for executor in running():
            self._mesh(executor)
        threading.Thread(target=self._run, name="monarch telemetry", daemon=True).start()

    def stop(self) -> None:
        """Hand on what there is, and record no more. Idempotent."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._ended.set()
        self.flush()

    def flush(self) -> None:
        """Hand on all rows so far."""
        with self._flushing:
            rows = {name: [each.popleft() for _ in range(len(each))] for name, each in self._rows.items() if each}
            if rows:
                self._give(rows)

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            try:
                self.flush()
            except Exception:  # the rows are lost; those to come need not be
                sys.stderr.write(f"monarch: rows of telemetry are lost:\n{traceback.format_exc()}")

    # -- events, as rows -----------------------------------------------------------------------------------------------

    def _now(self) -> int:
        return time.time_ns() // 1000

    def _at(self, monotonic: int) -> int:
        return (self._epoch + monotonic) // 1000

    def _mesh(self, executor: Executor) -> str:
        """The id of a mesh of workers, which is a row of its own when it is first seen."""
        known = self._meshes.get(executor)
        if known is None:
            spec = executor.mesh
            known = self._meshes[executor] = f"workers-{next(self._numbers)}"
            shape = ", ".join(f"{dim}={size}" for dim, size in spec.dims)
            self._rows["meshes"].append((self._now(), known, "workers", str(spec), shape, spec.workers))
        return known

    def _on_span(self, span: Span) -> None:
        at, took = (self._epoch + span.start) // 1000, (span.end - span.start) / 1000
        if span.kind == "run":
            self._rows["steps"].append((at, self._mesh(span.executor), span.label, span.number, took))
        else:
            self._rows["spans"].append((at, 0, 0, span.kind, span.label, "", took))

    def _on_workers(self, status: WorkersStatus) -> None:
        mesh, name = self._mesh(status.executor), str(status.executor.mesh)
        word = "Running" if status.is_running else "Ended"
        self._rows["status_events"].append((self._now(), "mesh", mesh, name, word, ""))

    def _on_failure(self, failure: Failure) -> None:
        self._rows["status_events"].append((self._now(), "mesh", "", str(failure.mesh), "Failed", str(failure.error)))

    def _on_spawned(self, spawned: Spawned) -> None:
        row = spawned.id, spawned.kind, spawned.name, spawned.shape, spawned.size
        self._rows["meshes"].append((self._now(), *row))

    def _on_status(self, status: Status) -> None:
        now, id = self._now(), f"{status.mesh}[{status.rank}]"
        if status.status == "Created":
            self._rows["actors"].append((now, id, status.mesh, status.rank, status.name, status.cls))
        self._rows["status_events"].append((now, status.kind, id, status.name, status.status, status.reason))

    def _on_handled(self, message: Handled) -> None:
        took = (message.end - message.start) / 1000
        status = "complete" if message.well else "failed"
        id = f"{message.mesh}[{message.rank}]"
        row = self._at(message.start), id, message.endpoint, message.sender, took, message.queued, status
        self._rows["messages"].append(row)

    def _on_timed(self, span: Timed) -> None:
        took = (span.end - span.start) / 1000
        self._rows["spans"].append(
            (self._at(span.start), span.number, span.parent, "span", span.name, span.actor, took)
        )

    def _on_metric(self, metric: Metric) -> None:
        row = metric.kind, metric.name, metric.value, metric.unit, metric.attributes, metric.step
        self._rows["metrics"].append((self._now(), *row))


current: Recording | None = None
"""This process's recorder, if it records."""


def start(bounds: Bounds, give: Callable[[Rows], object]) -> Recording:
    """Record what happens in this process from now on."""
    global current
    assert current is None
    current = Recording(bounds, give)
    return current


def stop() -> None:
    """Record no more. Idempotent."""
    global current
    if current is not None:
        current.stop()
        current = None


def bounds() -> Bounds | None:
    """The setting for processes that are spawned from here, if they are to record."""
    return None if current is None else current.bounds


def _after_fork() -> None:
    global current
    current = None


os.register_at_fork(after_in_child=_after_fork)
