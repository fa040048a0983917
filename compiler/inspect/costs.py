"""The cost of a step for a worker, by the user's lines, by module, op, mesh dim, phase, or stage of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.inspect.memory import alive
from monarch.compiler.inspect.values import computed, further_results, line_of, report_of, source_of
from monarch.compiler.plan.report import peak

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan
    from monarch.compiler.plan.report import Collectives, ReportedValue

_REST = {
    "line": "(no line of yours)",
    "module": "(no module)",
    "op": "",
    "mesh-dim": "(within workers)",
    "phase": "",
    "stage": "(no stage)",
}
"""The name of the group of values that belong to none."""

_WAITING = "(not given back yet)"
"""The name of the row of bytes at the peak that nothing reads any more."""

COSTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "time": lambda row: row["computing"] + row["communicating"],
    "bytes": lambda row: row["sent"],
    "memory": lambda row: row["peak_bytes"],
}
"""The sort keys of rows: seconds, bytes sent, bytes at the peak."""


class Key(Protocol):
    """The group of a value, or of collectives that it runs."""

    def __call__(self, value: ReportedValue, part: Collectives | None = None, /) -> str: ...


def costs_by(plan: Plan, by: str, sort: str = "time") -> list[dict[str, Any]]:
    """For each line (module, op, mesh dim, phase, stage): its ops, flops, bytes moved in a worker's memory, estimated
    seconds of computing and of communicating, collectives and bytes that a worker sends, by kind, and the bytes alive
    at the peak that it has made; by what it costs in time, bytes sent or memory, the dearest first.

    Modules that differ in numbers alone are one row: `blocks.*.mlp` stands for `modules` of them. What an installed
    library computes belongs to the user's line that called it, and `within` has the library's lines. The collectives of
    a loop or a branch belong to its line, module and phase, but have an op and mesh dims of their own. What the peak
    has beyond what a later value still needs is a row of its own, so that a worker's totals are those of all rows.
    Raises MonarchError for another `by` or `sort`.
    """
    if by not in _REST:
        raise MonarchError(f"--by {by!r}: a step's costs can be by {', '.join(_REST)}")
    if sort not in COSTS:
        raise MonarchError(f"--sort {sort!r}: rows can be sorted by {', '.join(COSTS)}")
    key = _grouping(plan, by)
    values = computed(plan)
    again = further_results(plan, values)
    rows: dict[str, dict[str, Any]] = {}
    for number, value in enumerate(values):
        row = rows.setdefault(key(value), _row(plan, by, key, value))
        row["ops"] += number not in again
        row["flops"] += value.flops
        row["moved"] += value.moved
        row["computing"] += value.computing
        if "within" in row and (source := source_of(plan, value)) is not None and source.caller is not None:
            kept = row["within"].setdefault(
                _library_place(source), {"code": line_of(plan, source), "seconds": 0.0, "sent": 0}
            )
            kept["seconds"] += value.seconds
            kept["sent"] += value.sent
        for each in value.collectives:
            row = rows.setdefault(key(value, each), _row(plan, by, key, value, each))
            kept = row["collectives"].setdefault(_kind(each), {"count": 0, "bytes": 0, "seconds": 0.0})
            kept["count"] += each.count
            kept["bytes"] += each.sent
            kept["seconds"] += each.seconds
            row["communicating"] += each.seconds
            row["sent"] += each.sent
    held = alive(plan)
    for value, taken in held:
        rows.setdefault(key(value), _row(plan, by, key, value))["peak_bytes"] += taken
    if by == "module":
        names: dict[str, set[str]] = {}
        for value in report_of(plan).values:
            names.setdefault(key(value), set()).add(value.module)
        for name, row in rows.items():
            row["modules"] = len(names[name])
    most, _ = peak(plan)
    if most != (needed := sum(taken for _, taken in held)):
        rows[_WAITING] = {"name": _WAITING, **_nothing(), "peak_bytes": most - needed}
    cost = COSTS[sort]
    return sorted(rows.values(), key=lambda row: (-cost(row), -row["ops"], row["name"]))


def _row(plan: Plan, by: str, key: Key, value: ReportedValue, part: Collectives | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": key(value, part) or _REST[by]}
    source = source_of(plan, value)
    if by == "line" and source is not None:
        own = source.own
        row |= {"file": own.file, "line": own.line, "code": line_of(plan, own), "within": {}}
    return row | _nothing()


def _nothing() -> dict[str, Any]:
    return {
        "ops": 0,
        "flops": 0.0,
        "moved": 0,
        "computing": 0.0,
        "communicating": 0.0,
        "sent": 0,
        "peak_bytes": 0,
        "collectives": {},
    }


def _grouping(plan: Plan, by: str) -> Key:
    def own(part: ReportedValue | Collectives) -> str:
        return _kind(part) if part.mesh_dims else part.op

    if by == "line":
        return lambda value, part=None: _place(source.own) if (source := source_of(plan, value)) else ""
    if by == "module":
        return lambda value, part=None: re.sub(r"(?<![^.])\d+(?![^.])", "*", value.module)
    if by == "op":
        return lambda value, part=None: own(part or value)
    if by == "mesh-dim":
        return lambda value, part=None: ",".join((part or value).mesh_dims)
    if by == "stage":
        return lambda value, part=None: f"stage {value.stage}" if value.stage >= 0 else ""
    return lambda value, part=None: value.phase


def _kind(part: ReportedValue | Collectives) -> str:
    return f"{part.op} over {','.join(part.mesh_dims)}"


def _place(source: Source) -> str:
    """A line for people: the file's path from the current folder, if it is below."""
    path, here = Path(source.file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else source.file}:{source.line}"


def _library_place(source: Source) -> str:
    """A library's line: its path within the packages."""
    return re.sub(r"^(?:.*/)?(?:site|dist)-packages/", "", _place(source))
