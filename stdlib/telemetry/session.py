"""`monarch.telemetry.start`, `stop` and `query`."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.events import Metric, tell
from monarch.compiler.loading import load
from monarch.runtime.actors.telemetry import collecting
from monarch.runtime.actors.telemetry.kept import arrow
from monarch.runtime.actors.telemetry.recording import Bounds
from monarch.runtime.actors.telemetry.tables import TABLES, columns
from monarch.stdlib import logs
from monarch.stdlib.live.page import dashboard
from monarch.stdlib.telemetry.exporters import Exporter, OpenTelemetry, Prometheus

logger = logging.getLogger("monarch")

_VIEWS = {
    "actor_status_events": "SELECT timestamp_us, id AS actor_id, new_status, reason, process, pid, host"
    " FROM status_events WHERE kind = 'actor'",
}
"""Tables that are made of others, under the names that PyTorch Monarch's users know."""


@dataclass(frozen=True)
class TelemetryConfig:
    """How telemetry is kept, and where else it goes.

    `retention_secs`    how old rows may become, in seconds; 0: however old
    `memory`            the bytes that each host keeps at most, the newest; None: as the setting `telemetry_memory` says
    `prometheus`        a file that Prometheus' textfile collector reads, such as "/var/lib/node_exporter/monarch.prom"
    `opentelemetry`     whether spans and metrics go to the providers that the program has given OpenTelemetry
    `export_interval`   how often these two get what is new, in seconds
    `include_dashboard` whether the program serves the live page too (`monarch.dashboard`), and prints its address
    `dashboard_port`    the port of that page, on loopback; 0: one that is free

    `snapshot_interval_secs` is taken for programs that were written for PyTorch Monarch, which looks at its meshes so
    often. Here the tables have each change when it happens, and it changes nothing.

    Raises ValueError for numbers that cannot be meant.
    """

    retention_secs: float = 3600
    memory: int | None = None
    prometheus: str | None = None
    opentelemetry: bool = False
    export_interval: float = 10.0
    include_dashboard: bool = False
    dashboard_port: int = 0
    snapshot_interval_secs: float = 30.0

    def __post_init__(self) -> None:
        for name, what, ok in (
            ("retention_secs", "seconds, 0 for ever", _number(self.retention_secs) and self.retention_secs >= 0),
            ("export_interval", "seconds, more than 0", _number(self.export_interval) and self.export_interval > 0),
            (
                "memory",
                "bytes, at least 1, or None",
                self.memory is None or (type(self.memory) is int and self.memory > 0),
            ),
        ):
            if not ok:
                raise ValueError(f"TelemetryConfig({name}={getattr(self, name)!r}): give a number of {what}")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class _Session:
    """The services that run while telemetry is on, beside the recording."""

    def __init__(self, config: TelemetryConfig) -> None:
        exporters: list[Exporter] = []
        if config.prometheus is not None:
            exporters.append(Prometheus(config.prometheus))
        if config.opentelemetry:
            exporters.append(OpenTelemetry())
        memory = settings.telemetry_memory if config.memory is None else config.memory
        collecting.start(Bounds(memory, config.retention_secs))
        self._log = logs.log_to(_logged)
        self.owner = os.getpid()
        self._exporters = exporters
        self._interval = config.export_interval
        self._after: dict[str, int] = {}
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="monarch telemetry export", daemon=True)
        if exporters:
            # Imports pandas. Were that done in the thread after Ctrl-C, Python would lose the interrupt that ended the
            # program.
            arrow().array([0])
            self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """Stop, and wait for the last export, so long at most."""
        try:
            self._log.close() if seconds is None else self._log.close_within(seconds)
            self._ended.set()
            if self._exporters:
                self._thread.join(seconds)
                if self._thread.is_alive():
                    logger.warning("the program ends without telemetry's last export: it has taken %g s", seconds)
                elif self._error is not None:
                    raise self._error
        finally:
            collecting.stop()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._export()
            except (MonarchError, OSError) as error:
                logger.warning("telemetry is not exported this time: %s", error)
        try:
            self._export()
        except Exception as error:  # the last time whoever ends it is told
            self._error = error

    def _export(self) -> None:
        """Give the exporters the rows that are new since the last time."""
        tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        for host, (newest, found) in collecting.gather(self._after).items():
            self._after[host] = newest
            for table, stream in found.items():
                tables[table] += _read(stream).to_pylist()
        for exporter in self._exporters:
            exporter.export(tables)


_session: _Session | None = None


def start(config: TelemetryConfig | None = None) -> None:
    """Record what happens from now on: steps, spans, metrics, messages, meshes and failures, in the program and in the
    processes of actors that it spawns from now on.

    Raises MonarchError where telemetry is on already, pyarrow is not installed (`pip install 'monarchc[telemetry]'`),
    or `config` names OpenTelemetry and that is not installed, or a file for Prometheus that cannot be written, or a
    port for the page that is taken: telemetry is off then.
    """
    global _session
    if _session is not None:
        raise MonarchError("telemetry is on already", hint="monarch.telemetry.stop() ends it.")
    config = config or TelemetryConfig()
    _session = _Session(config)
    if config.include_dashboard:
        try:
            url = dashboard(config.dashboard_port).url
        except BaseException:  # the port is taken, say
            stop()
            raise
        sys.stderr.write(f"Monarch Dashboard: {url}\n")


def stop() -> None:
    """Record nothing more, give the exporters the remaining rows, and drop all that are kept. Idempotent; the program's
    end does the same."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.stop()


def at_exit() -> None:
    """The same, at the program's end, which does not wait longer than the setting `exit_timeout` says."""
    global _session
    session, _session = _session, None
    if session is not None and session.owner == os.getpid():
        session.stop(settings.exit_timeout)


def query(sql: str) -> Any:
    """Ask the tables of all hosts with DuckDB's SQL. Gives a `pyarrow.Table`: `.to_pylist()`, `.to_pandas()`.

        monarch.telemetry.query("SELECT program, count(*), avg(call_us) FROM steps GROUP BY program")

    The tables are listed in docs/guide/telemetry.md. They have all events before the call; a host that does not answer
    is left out. Raises MonarchError where telemetry is off, DuckDB is not installed, or the SQL is wrong.
    """
    try:
        duckdb = load("duckdb")
    except ImportError as error:
        raise MonarchError(
            "telemetry is asked by DuckDB, which is not installed", hint="pip install 'monarchc[telemetry]'"
        ) from error
    found = collecting.gather({})
    pyarrow = arrow()
    with duckdb.connect() as connection:
        for table in TABLES:
            schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in columns(table).items()])
            parts = [_read(streams[table]) for _, streams in found.values() if table in streams]
            connection.register(table, pyarrow.concat_tables([schema.empty_table(), *parts]))
        for view, text in _VIEWS.items():
            connection.execute(f"CREATE VIEW {view} AS {text}")
        try:
            if not connection.extract_statements(sql):
                raise MonarchError("telemetry is asked nothing", hint="SELECT * FROM steps")
            return connection.execute(sql).to_arrow_table()
        except duckdb.Error as error:
            known = ", ".join([*TABLES, *_VIEWS])
            raise MonarchError(f"telemetry cannot be asked that: {error}", hint=f"the tables are {known}.") from error


def _read(stream: bytes) -> Any:
    return load("pyarrow.ipc").open_stream(stream).read_all()


def _logged(name: str, value: float, step: int) -> None:
    """A number of `monarch.log`."""
    tell(Metric("log", name, value, step=step))


__all__ = ["TelemetryConfig", "query", "start", "stop"]
