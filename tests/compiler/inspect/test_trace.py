"""A trace's file: it loads back exactly, viewers can read it, and nothing else is taken for one."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.inspect.labels import labels
from monarch.compiler.inspect.trace import Command, Handled, Span, Step, Trace, TracedPlan, load_trace, save_trace
from monarch.compiler.plan import Instruction, MeshSpec, Plan, Report, ReportedValue, Slot, TensorType, ValueSpec

MESH = MeshSpec.of(data=2)
GRAPH = """\
graph @step on mesh<data=2> partitioned<data> {
  %x = input 0                                        : f32[2, 4] of f32[4@data, 4]
  %loss = aten.sum(%x)                                : f32[] partial<sum: data>  # train.py:7:3-9
  %loss_all_reduce = all_reduce([%loss], ["data"], "sum") : (f32[])  # train.py:7; why : so
  %whole = getitem(%loss_all_reduce, 0)               : f32[]
  return %whole
}"""


def plan() -> Plan:
    x, scalar = TensorType(torch.float32, (4, 4)), TensorType(torch.float32, ())
    return Plan(
        name="step",
        mesh=MESH,
        inputs=(ValueSpec("input", 0, x, 0),),
        outputs=(ValueSpec("return", 0, scalar, 3),),
        instructions=(
            Instruction("aten.sum.default", (Slot(0),), {}, 1, (0,), 0),
            Instruction("commit", (), {}, -1),
            Instruction("all_reduce", ([Slot(1)], ["data"], "sum"), {}, 2, (1,), 0),
            Instruction("getitem", (Slot(2), 0), {}, 3, (2,)),
        ),
        slots=4,
        donated=(False,),
        sources=(Source("job/train.py", 7),),
        graph=GRAPH,
        hash="5e7",
    )


def trace(**changes: Any) -> Trace:
    def step(worker: int, number: int, at: int, **more: Any) -> Step:
        spans = (
            Span(0, at + 10, at + 200, 96),
            Span(1, at + 200, at + 300, 96, 60),
            Span(2, at + 301, at + 1500, 100, 900 - 300 * worker),
            Span(3, at + 1500, at + 1501, 100),
        )
        return Step(0, number, worker, at, at + 1600, spans, **more)

    whole = Trace(
        MESH,
        (TracedPlan("step", "5e7"),),
        (step(0, 3, 1_000), step(1, 3, 1_100), step(0, 4, 3_000), step(1, 4, 3_001, failed=True)),
        (
            Command("run", "step", 0, 900, 3),
            Command("put", "f32[4, 4]", 10, 500, 2),
            Command("run", "step", 950, 2_000, 4),
            Command("fetch", "f32[]", 1_500, 5_000, 5),  # of another thread: overlaps, and lies in no other
        ),
        (Handled("put", 2, 0, 800, 900), Handled("fetch", 5, 1, 4_700, 4_800)),
        7,
    )
    return replace(whole, **changes)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_loads_back_exactly(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_trace(trace(), path, [plan()])
    assert load_trace(path) == trace()
    assert path.read_bytes().startswith(b"\x1f\x8b" if name.endswith("gz") else b'{"traceEvents"')
    assert os.listdir(tmp_path) == [name]


numbers = st.integers(0, 2**62 - 1)
texts = st.text(max_size=8)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    def times(low: int = 0) -> tuple[int, int]:
        start = draw(st.integers(low, 2**50))
        return start, start + draw(st.integers(0, 2**40))

    mesh = MeshSpec(tuple((f"d{at}", size) for at, size in enumerate(draw(st.lists(st.integers(1, 3), max_size=3)))))
    plans = tuple(TracedPlan(*each) for each in draw(st.lists(st.tuples(texts, texts), min_size=1, max_size=3)))
    workers = st.integers(0, mesh.workers - 1)
    steps = []
    for _ in range(draw(st.integers(0, 4))):
        start, end = times(-1000)
        count = draw(st.integers(0, 3))
        inside = sorted(draw(st.lists(st.integers(start, end), min_size=2 * count, max_size=2 * count)))
        spans = [Span(draw(numbers), *inside[2 * at : 2 * at + 2], draw(numbers), draw(numbers)) for at in range(count)]
        place = draw(st.integers(0, len(plans) - 1)), draw(numbers), draw(workers)
        steps.append(Step(*place, start, end, tuple(spans), draw(st.booleans())))
    kinds = st.sampled_from(["load", "put", "run", "fetch", "wait"])
    commands = [Command(draw(kinds), draw(texts), *times(-1000), draw(numbers)) for _ in range(draw(st.integers(0, 4)))]
    handled = [Handled("free", draw(numbers), draw(workers), *times()) for _ in range(draw(st.integers(0, 3)))]
    return Trace(mesh, plans, tuple(steps), tuple(commands), tuple(handled), draw(numbers))


@given(traces())
def test_any_trace_loads_back_exactly(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    save_trace(trace, path, [plan()])
    assert load_trace(path) == trace


# -- the events --------------------------------------------------------------------------------------------------------


def check_format(events: list[dict[str, Any]]) -> None:
    """The rules of the trace event format: known phases with their fields, times from 0 in microseconds, lanes with
    names, spans of a lane in order and one within or behind another, and arrows that begin and end in a span."""
    fields = {
        "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"ph", "name", "pid", "ts", "args"},
        "M": {"ph", "name", "pid", "tid", "args"},
        "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
        "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    processes: set[int] = set()
    threads: set[tuple[int, int]] = set()
    lanes: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert set(event) == fields[event["ph"]]
        assert type(event["pid"]) is int and isinstance(event["name"], str)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes.add(event["pid"])
            if event["name"] == "thread_name":
                threads.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], float) and event["pid"] in processes
        if event["ph"] == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
            continue
        assert (event["pid"], event["tid"]) in threads
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            arrows[event["id"]].append(event)
    for ends in arrows.values():
        assert sorted(end["ph"] for end in ends) == ["f", "s"] and ends[0]["cat"] == ends[1]["cat"]
    for spans in lanes.values():
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Spans of a lane, and where arrows start and end. Of times in whole nanoseconds."""
    lanes: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            lanes[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for spans in lanes.values():
        under_way: list[int] = []
        for start, end in spans:
            while under_way and under_way[-1] <= start:
                under_way.pop()
            assert not under_way or end <= under_way[-1], "a span ends after the one that it began in"
            under_way.append(end)
    for event in events:
        if event["ph"] in "sf":
            at = round(event["ts"] * 1000)
            assert any(start <= at <= end for start, end in lanes[event["pid"], event["tid"]])


def saved(tmp_path: Path, trace: Trace, *plans: Plan) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    save_trace(trace, path, plans)
    found: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    check_format(found)
    check_nesting(found)
    return found


def test_viewers_see_workers_lanes_memory_and_arrows(tmp_path: Path) -> None:
    events = saved(tmp_path, trace(), plan())
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if "_name" in e["name"]}
    assert names == {
        (0, 0, "process_name"): "controller",
        (0, 1, "thread_name"): "commands",
        (0, 2, "thread_name"): "commands 2",
        **{(1 + rank, 0, "process_name"): f"worker {rank}: data={rank}" for rank in range(2)},
        **{
            (1 + rank, 1 + tid, "thread_name"): name
            for rank in range(2)
            for tid, name in enumerate(["steps and commands", "compute", "communication"])
        },
    }
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["tid"], e["name"]) for e in spans if e["pid"] == 0] == [
        (1, "run step"),
        (1, "put f32[4, 4]"),
        (1, "run step"),
        (2, "fetch f32[]"),
    ]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == (2, 1)] == [
        ("step", 1.1, 1.6),
        ("step (failed)", 3.001, 1.6),
        ("fetch", 4.7, 0.1),
    ]
    assert [e["name"] for e in spans if (e["pid"], e["tid"]) == (1, 2)] == ["loss", "whole"] * 2
    meets = [e for e in spans if (e["pid"], e["tid"]) == (1, 3)]
    assert [(e["name"], e["cat"]) for e in meets] == [
        ("commit", "communication"),
        ("loss_all_reduce", "communication"),
    ] * 2
    assert meets[1]["args"] == {
        "step": 3,
        "op": "all_reduce",
        "type": "(f32[])",
        "line": "train.py:7",
        "waited for peers (us)": 0.9,
    }
    assert [e["args"] for e in events if e["ph"] == "C" and e["pid"] == 2][:4] == [
        {"bytes": n} for n in (96, 96, 100, 100)
    ]
    starts = {e["id"]: e for e in events if e["ph"] == "s" and e["cat"] == "command"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert {(starts[i]["ts"], ends[i]["pid"], ends[i]["ts"]) for i in starts} == {
        (0.0, 1, 1.0),
        (0.0, 2, 1.1),
        (0.95, 1, 3.0),
        (0.95, 2, 3.001),
    }


def test_arrows_lead_from_the_last_to_come_to_those_that_wait_for_it(tmp_path: Path) -> None:
    def ends(trace: Trace) -> list[list[Any]]:
        found: defaultdict[int, list[Any]] = defaultdict(list)
        for e in saved(tmp_path, trace, plan()):
            if e["ph"] in "sf" and e["cat"] == "collective":
                assert e["tid"] == 3
                found[e["id"]] += [e["name"], e["pid"], e["ts"]]
        return list(found.values())

    # Worker 1 (process 2) comes last. In the first step worker 0 has left the commit by then, and waited for nobody.
    assert ends(trace()) == [
        ["loss_all_reduce", 2, 1.401, "loss_all_reduce", 1, 1.401],
        ["commit", 2, 3.201, "commit", 1, 3.201],
        ["loss_all_reduce", 2, 3.302, "loss_all_reduce", 1, 3.302],
    ]


def test_a_trace_taken_here_needs_no_plans_to_be_named(tmp_path: Path) -> None:
    own = trace(plans=(TracedPlan("step", "5e7", plan()),))
    assert "loss_all_reduce" in {event["name"] for event in saved(tmp_path, own)}
    other = {event["name"] for event in saved(tmp_path, trace(), replace(plan(), hash="other"))}
    assert "instruction 2" in other and "loss_all_reduce" not in other


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_come_from_the_report_or_from_the_graphs_text_or_from_the_ops() -> None:
    found = labels(plan())
    assert [(each.name, each.op, each.type, each.line) for each in found] == [
        ("loss", "aten.sum", "f32[] partial<sum: data>", "train.py:7"),
        ("commit", "commit", "", ""),
        ("loss_all_reduce", "all_reduce", "(f32[])", "train.py:7"),
        ("whole", "getitem", "f32[]", ""),
        ("commit", "commit", "", ""),
    ]
    assert [each.is_collective for each in found] == [False, True, True, False, True]
    without = labels(replace(plan(), graph="graph @step on mesh<data=2> {\n  %other = aten.sum(%x) : f32[]\n}"))
    assert [each.name for each in without[:4]] == ["aten.sum.default", "commit", "all_reduce", "getitem"]
    value = ReportedValue("total", "aten.sum", "aten.sum(%x)", (), (None,), 0, module="head", moved=64, seconds=2e-6)
    reported = labels(replace(plan(), report=Report((value,), ())))
    assert (reported[0].name, reported[0].module, reported[0].moved, reported[0].estimate) == (
        "total",
        "head",
        64,
        2e-6,
    )
    assert reported[0].line == "train.py:7" and reported[2].name == "all_reduce"


# -- what is no trace --------------------------------------------------------------------------------------------------


def damaged(**changes: Any) -> dict[str, Any]:
    own = {
        "version": 1,
        "mesh": [["data", 2]],
        "plans": [["step", "5e7"]],
        "commands": [["run", "step", 0, 9, 3]],
        "handled": [["put", 2, 0, 1, 2]],
        "dropped": 0,
        "steps": [[0, 3, 1, 0, 9, False, [0, 1, 2, 96, 0]]],
    }
    return {"traceEvents": [], "monarch": own | changes}


def test_the_sound_one_of_these_loads(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(damaged()))
    assert load_trace(tmp_path / "trace.json").steps == (Step(0, 3, 1, 0, 9, (Span(0, 1, 2, 96),)),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version '2', and this monarch reads version 1"),
        ({"version": "\x1b[31m"}, "version"),
        ({"mesh": {"data": 2}}, "the mesh is not a list"),
        ({"mesh": [["data", 2, 3]]}, "a mesh dim"),
        ({"mesh": [[3, 2]]}, "a mesh dim"),
        ({"mesh": [["data", 0]]}, "out of range"),
        ({"mesh": [["data", True]]}, "out of range"),
        ({"mesh": [["data", 2], ["data", 2]]}, "stands twice"),
        ({"mesh": [["a b", 2]]}, "cannot be named"),
        ({"mesh": [[f"d{at}", 2] for at in range(64)]}, "too large"),
        ({"plans": [["step"]]}, "'plans' has not 2 parts"),
        ({"plans": [["step", 7]]}, "a name is not text"),
        ({"plans": []}, "out of range"),
        ({"plans": None}, "'plans' is not a list"),
        ({"commands": [["shutdown", "", 0, 9, 3]]}, "a command is none of"),
        ({"commands": [["run", "step", 9, 0, 3]]}, "ends before it starts"),
        ({"commands": [["run", "step", 0.5, 9, 3]]}, "out of range"),
        ({"commands": [["run", "step", 0, 10**30, 3]]}, "out of range"),
        ({"handled": [["put", 2, 2, 1, 2]]}, "out of range"),
        ({"handled": [[["put"], 2, 0, 1, 2]]}, "a command is none of"),
        ({"dropped": -1}, "out of range"),
        ({"steps": [[0, 3, -1, 0, 9, False, []]]}, "out of range"),
        ({"steps": [[0, 3, 1, 0, 9, 0, []]]}, "whether a step failed"),
        ({"steps": [[0, 3, 1, 0, 9, False, [0, 1, 2, 96]]]}, "five whole numbers"),
        ({"steps": [[0, 3, 1, 0, 9, False, [0, 1, 2, 96, None]]]}, "five whole numbers"),
        ({"steps": [[0, 3, 1, 0, 9, False, [0, 1, 20, 96, 0]]]}, "outside of its step"),
        ({"steps": [[0, 3, 1, 0, 9, False, [0, 5, 4, 96, 0]]]}, "outside of its step"),
        ({"steps": [[0, 3, 1, 0, 9, False, [0, 5, 6, 96, 0, 1, 4, 7, 96, 0]]]}, "starts before the last one ended"),
        ({"steps": [[0, 3, 1, 0, 9, False, [0, 1, 2, -96, 0]]]}, "out of range"),
        ({"steps": ["abcdefg"]}, "'steps' has not 7 parts"),
    ],
    ids=str,
)  # fmt: skip
def test_an_edited_file_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(damaged(**changes)))
    with pytest.raises(MonarchError, match="trace.json is no trace of monarch's: ") as info:
        load_trace(path)
    assert said in info.value.message and info.value.message.isprintable()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is not JSON"),
        (b'{"traceEvents": [', "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b'{"traceEvents": []}', "it holds none of monarch's own data"),
        (b'[{"ph": "X"}]', "it holds none of monarch's own data"),
        (b'{"monarch": [1]}', "it holds none of monarch's own data"),
        (b"\x1f\x8bnonsense", "its compressed data is damaged"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "its compressed data is damaged"),
    ],
    ids=str,
)
def test_a_foreign_or_truncated_file_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(MonarchError) as info:
        load_trace(path)
    assert info.value.message == f"{path} is no trace of monarch's: {said}"


@given(st.data())
def test_a_file_with_any_byte_changed_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    save_trace(trace(), path)
    content = bytearray(path.read_bytes())
    own = content.index(b'"monarch"')
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(own, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        load_trace(path)
    except MonarchError as error:
        assert error.message


def test_files_that_cannot_be_read_or_written_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "missing.json", tmp_path / "nul\0.json"):
        with pytest.raises(MonarchError, match="cannot read|no regular file"):
            load_trace(path)
    with pytest.raises(MonarchError, match="cannot write"):
        save_trace(trace(), tmp_path / "no" / "trace.json")
    big = tmp_path / "big.json.gz"
    big.write_bytes(gzip.compress(b" " * 5000))
    monkeypatch.setattr("monarch.compiler.inspect.trace.MOST_BYTES", 4000)
    with pytest.raises(MonarchError, match="larger than"):
        load_trace(big)
