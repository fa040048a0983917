"""What a step costs a worker, by the user's lines, by module, op, mesh dim or phase."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.inspect.memory import alive
from monarch.compiler.inspect.values import further_results, line_of, report_of, source_of

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan
    from monarch.compiler.plan.report import Value

_REST = {
    "line": "(no line of yours)",
    "module": "(no module)",
    "op": "",
    "mesh-dim": "(within workers)",
    "phase": "",
}
"""What the group is called of values that belong to none."""

COSTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "time": lambda row: row["computing"] + row["communicating"],
    "bytes": lambda row: row["sent"],
    "memory": lambda row: row["peak_bytes"],
}
"""What rows are sorted by: seconds, bytes sent, bytes at the peak."""


def costs_by(plan: Plan, by: str, sort: str = "time") -> list[dict[str, Any]]:
    """For each line (module, op, mesh dim, phase): its ops, flops, bytes moved in a worker's memory, estimated seconds
    of computing and of communicating, collectives and bytes that a worker sends, by kind, and the bytes alive at the
    peak that it has made; by what it costs in time, bytes sent or memory, the dearest first.

    Modules that differ in numbers alone are one row: `blocks.*.mlp` stands for `modules` of them. What an installed
    library computes belongs to the user's line that called it, and `within` has the library's lines. A worker's totals
    are those of all rows. Raises MonarchError for another `by` or `sort`.
    """
    if by not in _REST:
        raise MonarchError(f"--by {by!r}: a step's costs can be by {', '.join(_REST)}")
    if sort not in COSTS:
        raise MonarchError(f"--sort {sort!r}: rows can be sorted by {', '.join(COSTS)}")
    key = _grouping(plan, by)
    values = [
        value for value in report_of(plan).values if value.instruction >= 0 and value.op not in ("getitem", "kernel")
    ]
    again = further_results(plan, values)
    rows: dict[str, dict[str, Any]] = {}
    for number, value in enumerate(values):
        row = rows.setdefault(key(value), _row(plan, by, key, value))
        row["ops"] += number not in again
        row["flops"] += value.flops
        row["moved"] += value.moved
        row["communicating" if value.mesh_dims else "computing"] += value.seconds
        if "within" in row and (source := source_of(plan, value)) is not None and source.caller is not None:
            kept = row["within"].setdefault(
                _library_place(source), {"code": line_of(plan, source), "seconds": 0.0, "sent": 0}
            )
            kept["seconds"] += value.seconds
            kept["sent"] += value.sent
        if value.mesh_dims:
            kept = row["collectives"].setdefault(
                f"{value.op} over {','.join(value.mesh_dims)}", {"count": 0, "bytes": 0, "seconds": 0.0}
            )
            kept["count"] += 1
            kept["bytes"] += value.sent
            kept["seconds"] += value.seconds
            row["sent"] += value.sent
    for value, held in alive(plan):
        rows.setdefault(key(value), _row(plan, by, key, value))["peak_bytes"] += held
    if by == "module":
        names: dict[str, set[str]] = {}
        for value in report_of(plan).values:
            names.setdefault(key(value), set()).add(value.module)
        for name, row in rows.items():
            row["modules"] = len(names[name])
    cost = COSTS[sort]
    return sorted(rows.values(), key=lambda row: (-cost(row), -row["ops"], row["name"]))


def _row(plan: Plan, by: str, key: Callable[[Value], str], value: Value) -> dict[str, Any]:
    row: dict[str, Any] = {"name": key(value) or _REST[by]}
    source = source_of(plan, value)
    if by == "line" and source is not None:
        own = source.own
        row |= {"file": own.file, "line": own.line, "code": line_of(plan, own), "within": {}}
    return row | {
        "ops": 0,
        "flops": 0.0,
        "moved": 0,
        "computing": 0.0,
        "communicating": 0.0,
        "sent": 0,
        "peak_bytes": 0,
        "collectives": {},
    }


def _grouping(plan: Plan, by: str) -> Callable[[Value], str]:
    if by == "line":
        return lambda value: _place(source.own) if (source := source_of(plan, value)) else ""
    if by == "module":
        return lambda value: re.sub(r"(?<![^.])\d+(?![^.])", "*", value.module)
    if by == "op":
        return lambda value: f"{value.op} over {','.join(value.mesh_dims)}" if value.mesh_dims else value.op
    if by == "mesh-dim":
        return lambda value: ",".join(value.mesh_dims)
    return lambda value: value.phase


def _place(source: Source) -> str:
    """A line for people: the file's path from where one is, if it lies below."""
    path, here = Path(source.file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else source.file}:{source.line}"


def _library_place(source: Source) -> str:
    """A library's line: its path within the packages."""
    return re.sub(r"^(?:.*/)?(?:site|dist)-packages/", "", _place(source))
