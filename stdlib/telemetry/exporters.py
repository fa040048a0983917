"""Where telemetry goes besides the tables: Prometheus, by a file; OpenTelemetry, by the program's own providers."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from monarch.compiler.errors import MonarchError
from monarch.compiler.loading import load

Tables = Mapping[str, Sequence[Mapping[str, Any]]]
"""The rows that are new, by table."""


class Exporter(Protocol):
    """Takes new rows, now and then."""

    def export(self, tables: Tables) -> None:
        """Take the rows. Raises OSError where they cannot be written."""


class Prometheus:
    """A file in Prometheus' text format, which the textfile collector of its node exporter reads. It is replaced as a
    whole, so that nobody reads half of one.

    Counters and gauges have their own names, histograms `_count`, `_sum`, `_min` and `_max`; beside them
    `monarch_steps_total`, `monarch_messages_total`, `monarch_failures_total` and `monarch_log`.
    """

    def __init__(self, path: str) -> None:
        """Raises MonarchError where the file cannot be written."""
        self._path = Path(path)
        self._values: dict[tuple[str, str], float] = {}
        self._types: dict[str, str] = {}
        try:
            self._write()
        except OSError as error:
            raise MonarchError(f"cannot write {path}: {error.strerror}", hint="its folder has to be there.") from error

    def export(self, tables: Tables) -> None:
        """See `Exporter.export`."""
        for row in tables["steps"]:
            self._add("monarch_steps_total", {"program": row["program"], "mesh": row["mesh_id"]}, 1)
        for row in tables["messages"]:
            self._add("monarch_messages_total", {"endpoint": row["endpoint"], "status": row["status"]}, 1)
        for row in tables["status_events"]:
            if row["new_status"] == "Failed":
                self._add("monarch_failures_total", {"kind": row["kind"]}, 1)
        for row in tables["metrics"]:
            self._metric(row)
        self._write()

    def _metric(self, row: Mapping[str, Any]) -> None:
        kind, value = row["kind"], row["value"]
        if kind == "log":
            self._set("monarch_log", {"name": row["name"]}, value)
            return
        name, labels = _name(row["name"]), {**json.loads(row["attributes"]), "process": row["process"]}
        if kind == "counter":
            self._add(name if name.endswith("_total") else f"{name}_total", labels, value)
        elif kind == "up_down_counter":
            self._set(name, labels, self._values.get((name, _labels(labels)), 0.0) + value)
        elif kind == "gauge":
            self._set(name, labels, value)
        else:
            self._add(f"{name}_count", labels, 1)
            self._add(f"{name}_sum", labels, value)
            text = _labels(labels)
            self._set(f"{name}_min", labels, min(value, self._values.get((f"{name}_min", text), value)))
            self._set(f"{name}_max", labels, max(value, self._values.get((f"{name}_max", text), value)))

    def _add(self, name: str, labels: Mapping[str, Any], value: float) -> None:
        key = name, _labels(labels)
        self._types[name] = "counter"
        self._values[key] = self._values.get(key, 0.0) + value

    def _set(self, name: str, labels: Mapping[str, Any], value: float) -> None:
        self._types[name] = "gauge"
        self._values[name, _labels(labels)] = value

    def _write(self) -> None:
        lines = []
        for name, kind in sorted(self._types.items()):
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{labels} {value!r}" for (key, labels), value in self._values.items() if key == name]
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=self._path.name, delete=False) as file:
            file.write("".join(f"{line}\n" for line in lines))
            os.fchmod(file.fileno(), 0o644)  # the collector is another user
        os.replace(file.name, self._path)


def _name(name: str) -> str:
    """As Prometheus has names: letters, digits, "_" and ":"."""
    text = "".join(each if each.isascii() and (each.isalnum() or each in "_:") else "_" for each in name)
    return f"_{text}" if text[:1].isdigit() else text


def _labels(labels: Mapping[str, Any]) -> str:
    def escaped(value: object) -> str:
        return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inner = ",".join(f'{_name(name)}="{escaped(value)}"' for name, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""


class OpenTelemetry:
    """Spans and metrics for the providers that the program has given OpenTelemetry, under the scope "monarch"."""

    def __init__(self) -> None:
        """Raises MonarchError where OpenTelemetry is not installed."""
        try:
            self._tracer = load("opentelemetry.trace:get_tracer")("monarch")
            self._meter = load("opentelemetry.metrics:get_meter")("monarch")
        except ImportError as error:
            raise MonarchError(
                "OpenTelemetry is not installed", hint="pip install 'monarchc[opentelemetry]'"
            ) from error
        self._instruments: dict[tuple[str, str], Any] = {}

    def export(self, tables: Tables) -> None:
        """See `Exporter.export`."""
        for row in tables["spans"]:
            self._span(row["name"], row["timestamp_us"], row["duration_us"], row, ("kind", "actor"))
        for row in tables["steps"]:
            self._span(row["program"], row["timestamp_us"], row["call_us"], row, ("mesh_id", "number"))
        for row in tables["messages"]:
            self._span(row["endpoint"], row["timestamp_us"], row["duration_us"], row, ("actor_id", "status", "queued"))
        for row in tables["metrics"]:
            where = {"process": row["process"], "host": row["host"]}
            self._record(
                row["kind"], row["name"], row["unit"], row["value"], {**json.loads(row["attributes"]), **where}
            )

    def _span(self, name: str, start: int, took: float, row: Mapping[str, Any], more: tuple[str, ...]) -> None:
        attributes = {f"monarch.{key}": row[key] for key in (*more, "process", "host")}
        span = self._tracer.start_span(name, start_time=start * 1000, attributes=attributes)
        span.end(end_time=int(start * 1000 + took * 1000))

    def _record(self, kind: str, name: str, unit: str, value: float, attributes: dict[str, Any]) -> None:
        instrument = self._instruments.get((kind, name))
        if instrument is None:
            make = "create_gauge" if kind == "log" else f"create_{kind}"
            instrument = self._instruments[kind, name] = getattr(self._meter, make)(name, unit=unit)
        if kind in ("counter", "up_down_counter"):
            instrument.add(value, attributes)
        elif kind == "histogram":
            instrument.record(value, attributes)
        else:
            instrument.set(value, attributes)
