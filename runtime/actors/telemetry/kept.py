"""A host's store of telemetry: each table as a ring of Arrow batches, the oldest of which go first.

A thread turns rows into batches, so that whoever receives them goes on at once. Batches have numbers that rise, by
which a reader asks for what is new.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarch.compiler.loading import load
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.telemetry.recording import Bounds
from monarch.runtime.actors.telemetry.tables import TABLES, Row, Rows, columns
from monarch.runtime.future import Future

ROWS = 1024
"""So many rows make a batch, unless somebody reads before."""
_OVERHEAD = 4096
"""About the bytes of a batch besides its values."""

Read = tuple[int, Mapping[str, bytes]]
"""The number of the newest batch, and by table the batches as an Arrow IPC stream."""


@dataclass(frozen=True)
class Where:
    """The process that rows come from."""

    process: str
    pid: int


class HostTables:
    """The tables of one host. Safe to use from several threads."""

    def __init__(self, bounds: Bounds) -> None:
        """Raises MonarchError where pyarrow is not installed."""
        self._arrow = arrow()
        self._schemas = {
            table: self._arrow.schema(
                [(name, self._arrow.type_for_alias(kind)) for name, kind in columns(table).items()]
            )
            for table in TABLES
        }
        self._most = bounds.memory // len(TABLES)
        self._seconds = bounds.seconds
        self._host = os.uname().nodename
        self._open: dict[str, list[Row]] = {table: [] for table in TABLES}
        self._rings: dict[str, deque[tuple[int, float, int, Any]]] = {table: deque() for table in TABLES}
        self._sizes = dict.fromkeys(TABLES, 0)
        self._newest = 0
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="monarch telemetry tables", daemon=True).start()

    def add(self, where: Where, read: Callable[[], Rows]) -> None:
        """Keep the rows that `read` gives, which is called in another thread."""
        self._work.put(lambda: self._add(where, read()))

    def read(self, after: int = 0) -> Read:
        """The rows added so far and not dropped since, in the batches behind number `after`. Waits for them."""
        found: Future[Read] = Future.pending()
        self._work.put(lambda: found.resolve(partial(self._read, after)))
        return found.get()

    def close(self) -> None:
        """End the thread, after its former tasks."""
        self._work.put(None)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            try:
                task()
            except Exception:  # of these rows only
                sys.stderr.write(f"monarch: rows of telemetry are lost:\n{traceback.format_exc()}")

    def _add(self, where: Where, rows: Rows) -> None:
        last = (where.process, where.pid, self._host)
        for table, added in rows.items():
            opened = self._open[table]
            opened += [(*row, *last) for row in added]
            if len(opened) >= ROWS:
                self._seal(table)

    def _seal(self, table: str) -> None:
        """Make a batch of the rows that wait for more, and drop batches that are too old or too many."""
        rows, self._open[table] = self._open[table], []
        ring = self._rings[table]
        if rows:
            schema = self._schemas[table]
            made = [
                self._arrow.array(list(column), field.type)
                for column, field in zip(zip(*rows, strict=True), schema, strict=True)
            ]
            batch = self._arrow.RecordBatch.from_arrays(made, schema=schema)
            self._newest += 1
            size = batch.nbytes + _OVERHEAD
            ring.append((self._newest, time.monotonic(), size, batch))
            self._sizes[table] += size
        oldest = time.monotonic() - self._seconds if self._seconds else 0.0
        while ring and (self._sizes[table] > self._most or ring[0][1] < oldest):
            self._sizes[table] -= ring.popleft()[2]

    def _read(self, after: int) -> Read:
        found: dict[str, bytes] = {}
        for table, ring in self._rings.items():
            self._seal(table)
            if new := [batch for number, _, _, batch in ring if number > after]:
                sink = self._arrow.BufferOutputStream()
                with self._arrow.ipc.new_stream(sink, self._schemas[table]) as stream:
                    for batch in new:
                        stream.write_batch(batch)
                found[table] = sink.getvalue().to_pybytes()
        return self._newest, found


def arrow() -> Any:
    """pyarrow, with its `ipc`. Raises MonarchError where it is not installed."""
    try:
        load("pyarrow.ipc")
        return load("pyarrow")
    except ImportError as error:
        raise MonarchError(
            f"telemetry is kept by pyarrow, which is not installed on {os.uname().nodename}",
            hint="pip install 'monarchc[telemetry]'",
        ) from error
