"""`monarch.telemetry`: what happens is found in tables, on every host, within bounds; and by OpenTelemetry and
Prometheus."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monarch
from monarch.actor import Actor, ActorError, current_rank, endpoint, get_meter, span, this_host, traced
from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.events import Span, Timed, heard
from monarch.compiler.execution.reports import reports_are_wanted
from monarch.distributed import Mesh
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.protocol import RECORD
from monarch.runtime.actors.telemetry import recording
from monarch.runtime.actors.telemetry.collecting import Collector
from monarch.runtime.actors.telemetry.kept import HostTables, Where
from monarch.runtime.actors.telemetry.recording import Bounds
from monarch.stdlib.telemetry.exporters import Prometheus
from monarch.telemetry import TelemetryConfig
from tests import python
from tests.later import Later
from tests.runtime.actors.agents import TOKEN, hosts_here

pyarrow = Later("pyarrow", "ipc")


class Trainer(Actor):
    """Says, times and counts something."""

    @endpoint
    def train(self, step: int) -> int:
        with span("batch"):
            get_meter().create_counter("batches", unit="1").add(2, {"kind": "text"})
        return step + current_rank().rank

    @endpoint
    def break_(self) -> None:
        raise ValueError("no data")


class Careless(Actor):
    """Fails while it is made."""

    def __init__(self) -> None:
        raise ValueError("no file")

    @endpoint
    def nothing(self) -> None: ...


def ask(sql: str) -> list[dict[str, Any]]:
    return monarch.telemetry.query(sql).to_pylist()


@pytest.fixture
def telemetry() -> Iterator[None]:
    monarch.telemetry.start()
    yield
    monarch.telemetry.stop()


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_it_is_off_until_it_is_started() -> None:
    with span("unseen"):
        get_meter().create_counter("unseen").add(1)
    assert not heard(Span) and not heard(Timed)
    with pytest.raises(MonarchError, match="telemetry is off"):
        monarch.telemetry.query("SELECT 1")
    monarch.telemetry.start()
    assert ask("SELECT count(*) AS n FROM spans") == [{"n": 0}]
    monarch.telemetry.stop()
    monarch.telemetry.stop()
    assert not heard(Span) and not heard(Timed)


def test_spans_have_the_one_around_them_also_of_coroutines(telemetry: None) -> None:
    @traced
    async def load() -> None:
        with span("inner"):
            await asyncio.sleep(0)

    @traced(name="both")
    def run() -> int:
        asyncio.run(load())
        return 3

    assert run() == 3
    with pytest.raises(KeyError), span("failing"):
        raise KeyError
    rows = {row["name"]: row for row in ask("SELECT * FROM spans")}
    assert set(rows) == {"load", "inner", "both", "failing"}
    assert rows["inner"]["parent_id"] == rows["load"]["id"]
    assert rows["load"]["parent_id"] == rows["both"]["id"]
    assert rows["both"]["parent_id"] == rows["failing"]["parent_id"] == 0
    assert rows["both"]["duration_us"] >= rows["load"]["duration_us"] >= rows["inner"]["duration_us"]
    assert {(row["process"], row["kind"], row["actor"]) for row in rows.values()} == {("program", "span", "")}


def test_metrics_have_their_kind_unit_and_attributes(telemetry: None) -> None:
    meter = get_meter()
    meter.create_counter("hits", unit="1", description="hits").add(2, {"kind": "a", "at": 1})
    meter.create_up_down_counter("open").add(-1)
    meter.create_histogram("seconds", unit="s").record(0.25)
    meter.create_gauge("level").set(7)
    for amount in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="counts up"):
            meter.create_counter("hits").add(amount)
    rows = ask("SELECT name, kind, value, unit, attributes, step FROM metrics")
    assert [tuple(row.values()) for row in rows] == [
        ("hits", "counter", 2.0, "1", '{"at": 1, "kind": "a"}', None),
        ("open", "up_down_counter", -1.0, "", "{}", None),
        ("seconds", "histogram", 0.25, "s", "{}", None),
        ("level", "gauge", 7.0, "", "{}", None),
    ]


def test_steps_of_a_mesh_and_what_is_logged(telemetry: None) -> None:
    """Only processes tell of steps."""
    assert not reports_are_wanted()  # or else programs would be compiled anew, with what the inspector shows
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, "[@data]")

        @monarch.program
        def train(x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        for step in range(3):
            monarch.log("loss", train(x), step)
    rows = ask("SELECT s.program, m.name, m.shape, m.size, s.call_us FROM steps s JOIN meshes m ON m.id = s.mesh_id")
    assert [tuple(row.values())[:4] for row in rows] == [("train", "mesh<data=2>", "data=2", 2)] * 3
    assert all(row["call_us"] > 0 for row in rows)
    # The mesh was closed, and gave what was logged before.
    rows = ask("SELECT name, step, value FROM metrics WHERE kind = 'log'")
    assert [tuple(row.values()) for row in rows] == [("loss", step, 4.0) for step in range(3)]
    assert ask("SELECT new_status FROM status_events") == [{"new_status": "Running"}, {"new_status": "Ended"}]
    assert {row["kind"] for row in ask("SELECT kind FROM spans")} >= {"put", "load"}


def test_actors_their_messages_and_how_they_end(telemetry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", failed.append)
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    trainers = procs.spawn("trainers", Trainer)
    assert trainers.train.call(5).get().values() is not None
    with pytest.raises(ActorError):
        trainers.slice(gpus=0).break_.call_one().get()
    careless = procs.slice(gpus=1).spawn("careless", Careless)
    with pytest.raises(monarch.actor.SupervisionError):
        careless.nothing.call_one().get()

    rows = ask("SELECT full_name, rank, class_name, process FROM actors WHERE full_name LIKE 'train%' ORDER BY rank")
    assert [tuple(row.values()) for row in rows] == [
        (f"trainers[{rank}]", rank, f"{__name__}.Trainer", f"procs gpus={rank}") for rank in range(2)
    ]
    rows = ask(
        "SELECT a.full_name, m.endpoint, m.status FROM messages m JOIN actors a ON a.id = m.actor_id"
        " WHERE m.endpoint IN ('train', 'break_') ORDER BY ALL"
    )
    assert [tuple(row.values()) for row in rows] == [
        ("trainers[0]", "break_", "failed"),
        ("trainers[0]", "train", "complete"),
        ("trainers[1]", "train", "complete"),
    ]
    rows = ask("SELECT kind, name, shape, size FROM meshes WHERE kind <> 'workers' ORDER BY kind, name")
    assert [tuple(row.values()) for row in rows] == [
        ("actors", "careless", "", 1),
        ("actors", "trainers", "gpus=2", 2),
        ("processes", "procs", "gpus=2", 2),
    ]
    rows = ask("SELECT name, new_status, reason FROM status_events WHERE kind = 'actor' AND new_status = 'Failed'")
    assert [(row["name"], row["new_status"]) for row in rows] == [("careless", "Failed")]
    assert "no file" in rows[0]["reason"]
    # torchmonarch's question, with its names.
    rows = ask(
        "SELECT a.full_name, s.new_status, s.reason, s.timestamp_us FROM actor_status_events AS s"
        " JOIN actors AS a ON a.id = s.actor_id WHERE s.new_status = 'Idle' ORDER BY a.full_name"
    )
    assert [row["full_name"] for row in rows] == ["trainers[0]", "trainers[1]"]
    rows = ask("SELECT actor, name, process FROM spans ORDER BY actor")
    assert [tuple(row.values()) for row in rows] == [
        (f"trainers[{rank}]", "batch", f"procs gpus={rank}") for rank in range(2)
    ]
    assert ask("SELECT sum(value) AS n FROM metrics WHERE name = 'batches'") == [{"n": 4.0}]
    procs.stop().get()
    rows = ask("SELECT name, new_status FROM status_events WHERE kind = 'process' ORDER BY name")
    assert [tuple(row.values()) for row in rows] == [("procs[0]", "Stopped"), ("procs[1]", "Stopped")]
    rows = ask("SELECT name FROM status_events WHERE kind = 'actor' AND new_status = 'Stopped' ORDER BY name")
    assert [row["name"] for row in rows] == ["trainers[0]", "trainers[1]"]  # told while they ended
    assert len(failed) == 1


def test_what_happens_on_other_hosts_stays_there_until_it_is_asked_for(telemetry: None, tmp_path: Path) -> None:
    with hosts_here(1, tmp_path) as there, monarch.hosts(there.addresses, token=TOKEN) as hosts:
        procs = hosts.spawn_procs(per_host={"gpus": 2})
        procs.spawn("trainers", Trainer).train.call(1).get()
        rows = ask("SELECT process, name FROM spans ORDER BY process")
        assert [row["name"] for row in rows] == ["batch", "batch"]
        assert {row["process"] for row in rows} == {"procs hosts=0,gpus=0", "procs hosts=0,gpus=1"}
        assert ask("SELECT DISTINCT process FROM meshes") == [{"process": "program"}]
        procs.stop().get()
        rows = ask("SELECT name, new_status, process FROM status_events WHERE kind = 'process' ORDER BY name")
        assert [tuple(row.values()) for row in rows] == [(f"procs[{at}]", "Stopped", "program") for at in range(2)]


# -- what is kept ------------------------------------------------------------------------------------------------------


def row(number: int) -> tuple[object, ...]:
    return number, "counter", f"metric {number}", 1.0, "", "{}", None


def metrics(kept: HostTables, after: int = 0) -> list[int]:
    stream = kept.read(after)[1].get("metrics")
    return [] if stream is None else pyarrow.ipc.open_stream(stream).read_all()["timestamp_us"].to_pylist()


def test_the_oldest_rows_go_when_there_are_too_many() -> None:
    kept = HostTables(Bounds(7 * 200_000, 0))
    for first in range(0, 20_480, 1024):
        kept.add(Where("program", 1), lambda first=first: {"metrics": [row(first + at) for at in range(1024)]})
    found = metrics(kept)
    assert found == list(range(found[0], 20_480)), "the newest, in order"
    assert 1024 <= len(found) <= 4096
    kept.close()


def test_rows_that_are_too_old_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("monarch.runtime.actors.telemetry.kept.time.monotonic", lambda: now)
    kept = HostTables(Bounds(1 << 30, 60.0))
    kept.add(Where("program", 1), lambda: {"metrics": [row(1)]})
    assert metrics(kept) == [1]
    now = 150.0
    kept.add(Where("program", 1), lambda: {"metrics": [row(2)]})
    assert metrics(kept) == [1, 2]
    now = 165.0
    assert metrics(kept) == [2]
    kept.close()


def test_a_reader_can_ask_for_what_is_new() -> None:
    kept = HostTables(Bounds(1 << 20, 0))
    kept.add(Where("program", 1), lambda: {"metrics": [row(1)]})
    newest, _ = kept.read()
    assert metrics(kept, newest) == []
    kept.add(Where("program", 1), lambda: {"metrics": [row(2)]})
    assert metrics(kept, newest) == [2]
    kept.close()


def test_rows_that_cannot_be_read_are_lost_alone(capfd: pytest.CaptureFixture[str]) -> None:
    kept = HostTables(Bounds(1 << 20, 0))
    kept.add(Where("program", 1), lambda: {"metrics": [1 / 0]})
    kept.add(Where("program", 1), lambda: {"metrics": [row(2)]})
    assert metrics(kept) == [2]
    assert "rows of telemetry are lost" in capfd.readouterr().err
    kept.close()


def test_a_host_forgets_what_it_kept_for_a_program_that_is_gone() -> None:
    handlers: dict[int, Any] = {}
    group = SimpleNamespace(root="the program")
    process: Any = SimpleNamespace(address="the agent", group=group, handle=handlers.__setitem__)
    collector = Collector(process, list)
    assert collector.read(0) == (0, {}), "nobody has recorded anything"
    head = RECORD, "procs gpus=0", 7, 1 << 20, 60.0
    handlers[RECORD]("a process", head, Payload.of({"metrics": [row(5)]}))
    newest, found = collector.read(0)
    assert newest == 1 and set(found) == {"metrics"}
    collector.close()
    collector.close()
    assert collector.read(0) == (0, {})
    for thread in threading.enumerate():
        if thread.name == "monarch telemetry tables":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("config", "memory", "seconds"),
    [(TelemetryConfig(), 1 << 22, 3600), (TelemetryConfig(memory=5 << 20, retention_secs=9), 5 << 20, 9)],
)
def test_the_memory_is_what_the_setting_or_the_config_says(config: TelemetryConfig, memory: int, seconds: int) -> None:
    with monarch.configured(telemetry_memory="4 MiB"):
        monarch.telemetry.start(config)
    assert recording.bounds() == Bounds(memory, seconds)
    monarch.telemetry.stop()
    assert recording.bounds() is None


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_name_what_to_do(telemetry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MonarchError, match="telemetry is on already"):
        monarch.telemetry.start()
    with pytest.raises(MonarchError, match="(?s)cannot be asked that: .*nowhere.*the tables are meshes, actors"):
        monarch.telemetry.query("SELECT * FROM nowhere")
    with pytest.raises(MonarchError, match="telemetry is asked nothing"):
        monarch.telemetry.query(" ")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MonarchError, match=r"(?s)DuckDB, which is not installed.*monarchc\[telemetry\]"):
        monarch.telemetry.query("SELECT 1")


@pytest.mark.parametrize(
    "given",
    [{"retention_secs": -1}, {"retention_secs": "5m"}, {"export_interval": 0}, {"memory": 0}, {"memory": "1 GiB"}],
)
def test_numbers_that_cannot_be_meant_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=rf"TelemetryConfig\({name}=.*: give a number of"):
        TelemetryConfig(**given)


def test_it_is_off_where_the_page_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.stdlib.telemetry.session.dashboard", {}.__getitem__)
    with pytest.raises(KeyError, match="8265"):
        monarch.telemetry.start(TelemetryConfig(include_dashboard=True, dashboard_port=8265))
    with pytest.raises(MonarchError, match="telemetry is off"):
        monarch.telemetry.query("SELECT 1")


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MonarchError, match="cannot write"):
        monarch.telemetry.start(TelemetryConfig(prometheus=str(tmp_path / "nowhere" / "x.prom")))
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    with pytest.raises(MonarchError, match=r"(?s)pyarrow, which is not installed.*monarchc\[telemetry\]"):
        monarch.telemetry.start()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(MonarchError, match=r"(?s)OpenTelemetry is not installed.*monarchc\[opentelemetry\]"):
        monarch.telemetry.start(TelemetryConfig(opentelemetry=True))
    monarch.telemetry.start()  # nothing is left of these
    monarch.telemetry.stop()


# -- exporters ---------------------------------------------------------------------------------------------------------


def test_prometheus_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "monarch.prom"
    monarch.telemetry.start(TelemetryConfig(prometheus=str(path), export_interval=3600))
    meter = get_meter()
    for amount in (1, 2):
        meter.create_counter("cache.hits").add(amount, {"kind": 'a "b"\\'})
        meter.create_up_down_counter("open").add(amount)
        meter.create_gauge("level").set(amount)
        meter.create_histogram("9seconds").record(amount)
        monarch.log("loss", 1 / amount)
    monarch.telemetry.stop()
    assert path.read_text() == (
        "# TYPE _9seconds_count counter\n"
        '_9seconds_count{process="program"} 2.0\n'
        "# TYPE _9seconds_max gauge\n"
        '_9seconds_max{process="program"} 2.0\n'
        "# TYPE _9seconds_min gauge\n"
        '_9seconds_min{process="program"} 1.0\n'
        "# TYPE _9seconds_sum counter\n"
        '_9seconds_sum{process="program"} 3.0\n'
        "# TYPE cache_hits_total counter\n"
        'cache_hits_total{kind="a \\"b\\"\\\\",process="program"} 3.0\n'
        "# TYPE level gauge\n"
        'level{process="program"} 2.0\n'
        "# TYPE monarch_log gauge\n"
        'monarch_log{name="loss"} 0.5\n'
        "# TYPE open gauge\n"
        'open{process="program"} 3.0\n'
    )
    assert list(tmp_path.iterdir()) == [path]


def test_prometheus_counts_steps_messages_and_failures(tmp_path: Path) -> None:
    exporter = Prometheus(str(tmp_path / "x.prom"))
    step = {"program": "train", "mesh_id": "workers-1"}
    message = {"endpoint": "get", "status": "complete"}
    events = [{"new_status": "Failed", "kind": "actor"}, {"new_status": "Idle", "kind": "actor"}]
    tables = {"steps": [step], "messages": [message], "status_events": events, "metrics": []}
    exporter.export(tables)
    exporter.export(tables)
    text = (tmp_path / "x.prom").read_text()
    assert 'monarch_steps_total{mesh="workers-1",program="train"} 2.0\n' in text
    assert 'monarch_messages_total{endpoint="get",status="complete"} 2.0\n' in text
    assert 'monarch_failures_total{kind="actor"} 2.0\n' in text


def test_opentelemetrys_own_readers_find_spans_and_metrics() -> None:
    """In a process of its own: OpenTelemetry takes providers once."""
    pytest.importorskip("opentelemetry.sdk")
    program = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import monarch
from monarch.actor import get_meter, span

spans, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))
monarch.telemetry.start(monarch.telemetry.TelemetryConfig(opentelemetry=True, export_interval=3600))
with span("load"):
    get_meter().create_counter("hits", unit="1").add(2, {"kind": "a"})
    get_meter().create_counter("hits", unit="1").add(3, {"kind": "a"})
    get_meter().create_histogram("seconds", unit="s").record(0.5)
monarch.log("loss", 0.25)
monarch.telemetry.stop()
(found,) = spans.get_finished_spans()
print(found.name, found.attributes["monarch.process"], found.end_time > found.start_time)
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            (point,) = metric.data.data_points
            value = point.value if hasattr(point, "value") else point.sum
            print(scope.scope.name, metric.name, metric.unit, value, point.attributes.get("kind"))
"""
    ran = python.run("-c", program, capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == [
        "load program True",
        "monarch hits 1 5.0 a",
        "monarch seconds s 0.5 None",
        "monarch loss  0.25 None",
    ], ran.stderr


def test_the_live_page_can_be_part_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimpleNamespace(url="http://127.0.0.1:8265/?token=secret")
    monkeypatch.setattr("monarch.stdlib.telemetry.session.dashboard", {8265: served}.__getitem__)
    monarch.telemetry.start(TelemetryConfig(include_dashboard=True, dashboard_port=8265))
    monarch.telemetry.stop()
    assert capsys.readouterr().err == f"Monarch Dashboard: {served.url}\n"
