"""Reports in plan files: what is saved comes back, and what no compiler would write is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.errors import PlanError
from monarch.compiler.inspect.why import explain
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.container import MEMBERS, REPORT, seal, unseal
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.report import held, peak
from monarch.compiler.text import parse_graph
from tests.compiler.plan.test_hostile import HINT, JSON, LEAD, places, refused
from tests.sample import examples

TEXT = """graph @step on mesh<data=2, model=2> {
  %x = input 0 : f32[8@data, 4]
  %w = state "up.weight" : f32[4, 8@model]
  %v = state "down.weight" : f32[8@model, 4]
  %a = aten.mm(%x, %w) : f32[8, 8]  # train.py:3:5-10 in "up"
  %b = aten.mm(%a, %v) : f32[8, 4]  # train.py:4 in "down"
  %s = aten.sum(%b) : f32[]  # train.py:5
  %n = aten.sub.Tensor(%v, 0.5) : f32[8, 4]
  update "down.weight" = %n
  return %s
}"""


@cache
def plan() -> Plan:
    return compile_graph(parse_graph(TEXT), report=True)


def report() -> Any:
    """The good report's JSON value."""
    return json.loads(unseal(plan_bytes(plan()), "", MEMBERS)[1][REPORT])


def with_report(value: Any) -> bytes:
    manifest, members = unseal(plan_bytes(plan()), "", MEMBERS)
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return seal(manifest, {**members, REPORT: text})


def test_a_report_comes_back() -> None:
    loaded = plan_from_bytes(with_report(report()))
    assert loaded.report == plan().report
    assert loaded.report is not None and len(loaded.report.lines) == len(loaded.sources)
    assert plan_bytes(loaded) == plan_bytes(plan())


def test_a_plan_without_a_report_is_as_good() -> None:
    loaded = plan_from_bytes(with_report(None))
    assert loaded.report is None and loaded.hash == plan().hash


def test_what_ops_share_stands_there_once() -> None:
    parts = report()
    for table in ("strings", "types", "alternatives", "decisions"):
        rows = [json.dumps(row) for row in parts[table]]
        assert len(set(rows)) == len(rows)


FIELDS = (
    "name op call reads types instruction source module phase traced why decisions mesh_dims sent flops moved "
    "allocates frees seconds"
).split()


def edit(table: str, row: int, field: int | str, value: Any) -> Callable[[], Any]:
    def edited() -> Any:
        parts = report()
        parts[table][row][FIELDS.index(field) if isinstance(field, str) else field] = value
        return parts

    return edited


EDITS: dict[str, tuple[Callable[[], Any], str]] = {
    "a string that is not there": (edit("values", 0, "name", 999), "a string of the report is number 999, of "),
    "a string by another number": (edit("values", 0, "name", -1), "a string of the report is number -1, of "),
    "a string by name": (edit("values", 0, "name", "x"), "a string of the report is number 'x', of "),
    "a value read before it is made": (
        edit("values", 3, "reads", [3]),
        "a value that is read of the report is number 3, of 3",
    ),
    "reads that are no list": (edit("values", 3, "reads", 1), "reads is 1, not a list"),
    "a type that is not there": (edit("values", 3, "types", [99]), "a type of the report is number 99, of "),
    "an instruction that is not there": (edit("values", 3, "instruction", 99), "is made by instruction 99"),
    "instructions out of order": (edit("values", 3, "instruction", 3), "not in the order of the instructions"),
    "a source that is not there": (edit("values", 3, "source", 9), "has the source line 9"),
    "a phase that is none": (edit("values", 3, "phase", 3), "a phase of the report is number 3, of 3"),
    "a stage that is none": (edit("values", 3, -1, -2), "the stage of a value is -2"),
    "true for a number": (edit("values", 3, "phase", True), "a phase of the report is number True, of 3"),
    "a mesh dim that the mesh has not": (
        edit("values", 3, "mesh_dims", [0]),
        "which is no dim of mesh<data=2, model=2>",
    ),
    "bytes below zero": (edit("values", 3, "sent", -1), "the bytes sent is -1, not a whole number"),
    "half a byte": (edit("values", 3, "frees", 0.5), "the bytes freed is 0.5, not a whole number"),
    "seconds below zero": (edit("values", 3, "seconds", -1.0), "the seconds of a value of the report is -1.0"),
    "operations in words": (edit("values", 3, "flops", "many"), "the operations of a value of the report is 'many'"),
    "two decisions for one dim": (edit("values", 3, "decisions", [0, 0]), "has two decisions for one mesh dim"),
    "a cause that is not there": (edit("decisions", 0, 4, [99]), "a cause of the report is number 99, of "),
    "alternatives that are not there": (edit("decisions", 0, 5, 99), "the alternatives of a decision of the report is"),
    "neither exact nor not": (edit("decisions", 0, 6, 1), "whether a decision is exact is 1"),
    "a type that cannot lie on the mesh": (edit("types", 0, 1, [8]), "the layout of a value of the report has 2 dims"),
    "a short row": (
        lambda: {**report(), "values": [[0], *report()["values"][1:]]},
        "a value of the report is a list of 1, not a list of 22",
    ),
    "a report that is a list": (list, "the report is a list of 0, not an object with the keys strings, types"),
    "a key too many": (
        lambda: {**report(), "more": 1},
        "the report is a JSON object of 7, not an object with the keys",
    ),
    "lines missing": (lambda: {**report(), "lines": []}, "its report has 0 lines for"),
    "two values of one name": (edit("values", 1, "name", 0), "two values of its report have one name"),
}


@pytest.mark.parametrize(("edited", "message"), EDITS.values(), ids=EDITS.keys())
def test_what_a_report_cannot_say(edited: Callable[[], Any], message: str) -> None:
    refusal = refused(with_report(edited()))
    assert refusal.startswith(LEAD) and message in refusal and refusal.endswith(HINT)


@pytest.mark.parametrize("text", [b"", b"\xff", b"[", b"[" * 100_000, b'{"strings": NaN}'])
def test_reports_that_are_not_json(text: bytes) -> None:
    assert refused(with_report(text)).startswith("report.json of step.mplan ")


@given(st.data())
@examples(100, 300)
def test_any_report_loads_or_is_refused_and_what_loads_can_be_looked_at(data: st.DataObject) -> None:
    parts = copy.deepcopy(report())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([place for place in places(parts) if place]))
        target: Any = parts
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = data.draw(JSON | st.integers(0, 12))
    try:
        loaded = plan_from_bytes(with_report(parts), "step.mplan")
    except PlanError:
        return
    assert plan_from_bytes(plan_bytes(loaded)).report == loaded.report
    if loaded.report is not None:
        held(loaded)
        peak(loaded)
        for value in loaded.report.values:
            str(explain(loaded, value.name))


def test_a_report_can_be_left_where_it_is() -> None:
    """Who only runs a plan need not read it; that it is whole is checked all the same."""
    bare = plan_from_bytes(plan_bytes(plan()), report=False)
    assert bare.report is None and bare.hash == plan().hash
    assert bare == replace(plan_from_bytes(plan_bytes(plan())), report=None)
    data = bytearray(plan_bytes(plan()))
    at = bytes(data).index(b'"alternatives"')
    data[at + 1] ^= 1
    with pytest.raises(PlanError, match="was changed after it was written: its report.json"):
        plan_from_bytes(bytes(data), report=False)
