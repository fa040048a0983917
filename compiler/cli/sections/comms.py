"""`--comms`: the collectives of a step, by bytes."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import count, duration, heading, line, plain, size, table
from monarch.compiler.inspect.values import report_of, source_of, types_text, where
from monarch.compiler.plan import Plan


def data(plan: Plan) -> list[dict[str, Any]]:
    """Each collective with the bytes that a worker puts in (for all_gather: gets out), and its reason; most bytes
    first."""
    found = []
    for value, each in [(one, each) for one in report_of(plan).values for each in one.collectives]:
        source = source_of(plan, value)
        found.append(
            {
                "value": value.name,
                "op": each.op,
                "mesh_dims": list(each.mesh_dims),
                "count": each.count,
                "tensors": each.tensors,
                "types": types_text(value),
                "bytes": each.sent,
                "seconds": each.seconds,
                "phase": value.phase,
                "module": value.module,
                "where": where(plan, value),
                "file": source.file if source else "",
                "line": source.line if source else 0,
                "why": value.why,
            }
        )
    return sorted(found, key=lambda entry: (-entry["bytes"], -entry["seconds"]))


def show(out: Console, plan: Plan) -> None:
    rows = data(plan)
    if not rows:
        heading(out, "collectives", first=True)
        line(out, "  none: no worker needs data of another.")
        return
    total = sum(row["bytes"] for row in rows)
    heading(
        out,
        "collectives",
        f"{count(sum(row['count'] for row in rows), 'collective')}, {size(total)} a worker",
        first=True,
    )
    cells: list[tuple[object, ...]] = []
    for row in rows:
        times = "" if row["count"] == 1 else f"{row['count']:,} × "
        over = f"{times}{row['op']} over {','.join(row['mesh_dims'])}"
        numbers = (size(row["bytes"]), duration(row["seconds"]), row["tensors"], row["phase"])
        cells.append((*numbers, f"{over}, {row['where']}" if row["where"] else over))
        place = plain(f"{row['module']}: " if row["module"] else "")
        cells.append(("", "", "", "", place + plain(f"%{row['value']}", "cyan")))
    table(out, [">bytes", ">estimated", ">tensors", "phase", "~collective"], cells)
    line(out, plain(f"  why one is there: --why {rows[0]['value']}", "dim"))
