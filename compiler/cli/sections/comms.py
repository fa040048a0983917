"""`--comms`: the collectives of a step, by bytes."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import count, duration, heading, line, plain, size, table
from monarch.compiler.inspect.values import collectives_of, source_of, types_text, where
from monarch.compiler.plan import Plan


def data(plan: Plan) -> list[dict[str, Any]]:
    """Each collective with what a worker puts in (for all_gather: gets out), and why it is there; most bytes first."""
    found = []
    for value in collectives_of(plan):
        source = source_of(plan, value)
        found.append(
            {
                "value": value.name,
                "op": value.op,
                "mesh_dims": list(value.mesh_dims),
                "tensors": len(value.types),
                "types": types_text(value),
                "bytes": value.sent,
                "seconds": value.seconds,
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
        line(out, "  none: no worker needs anything of another.")
        return
    total = sum(row["bytes"] for row in rows)
    heading(out, "collectives", f"{count(len(rows), 'collective')}, {size(total)} a worker", first=True)
    cells: list[tuple[object, ...]] = []
    for row in rows:
        over = f"{row['op']} over {','.join(row['mesh_dims'])}"
        numbers = (size(row["bytes"]), duration(row["seconds"]), row["tensors"], row["phase"])
        cells.append((*numbers, f"{over}, {row['where']}" if row["where"] else over))
        place = plain(f"{row['module']}: " if row["module"] else "")
        cells.append(("", "", "", "", place + plain(f"%{row['value']}", "cyan")))
    table(out, [">bytes", ">estimated", ">tensors", "phase", "~collective"], cells)
    line(out, plain(f"  why one is there: --why {rows[0]['value']}", "dim"))
