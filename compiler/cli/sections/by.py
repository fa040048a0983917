"""`--by line`: the cost of a step for a worker, by line, module, op, mesh dim, phase or stage; the most expensive
first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from monarch.compiler.cli.screen import amount, count, duration, heading, line, plain, size, table
from monarch.compiler.inspect.costs import COSTS, costs_by

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan

_SHOWN = 30
_WITHIN = 8
_WIDE = 98


def _within(row: dict[str, Any], sort: str) -> Iterator[tuple[Text]]:
    """The lines of libraries that a line of the user's called, the dearest first."""
    lines = row.get("within") or {}
    order = sorted(lines.items(), key=lambda item: -item[1]["sent" if sort == "bytes" else "seconds"])
    for place, kept in order[:_WITHIN]:
        sent = f", sends {size(kept['sent'])}" if kept["sent"] else ""
        yield (plain(f"  {duration(kept['seconds']):>8}{sent}  {place}  {kept['code']}"[:_WIDE]),)
    if len(order) > _WITHIN:
        yield (
            plain(
                f"  and {count(len(order) - _WITHIN, 'line')} more of libraries: --by module tells them apart", "dim"
            ),
        )


def show(out: Console, plan: Plan, by: str, sort: str = "time") -> None:
    rows = costs_by(plan, by, sort)
    cost = COSTS[sort]
    total = sum(cost(row) for row in rows)
    unit = duration if sort == "time" else size
    of = {"time": "estimated", "bytes": "sent", "memory": "at the peak"}[sort]
    heading(out, f"by {by}", f"a step's cost for a worker: {unit(total)} {of} in all", first=True)
    cells: list[tuple[object, ...]] = []
    for row in rows[:_SHOWN]:
        share = cost(row) / total if total else 0.0
        name = row["name"] if row.get("modules", 1) == 1 else f"{row['name']}  ×{row['modules']}"
        numbers = (
            f"{row['ops']:,}" if row["ops"] else "",
            amount(row["flops"]) if row["flops"] else "",
            duration(row["computing"]) if row["computing"] else "",
            size(row["sent"]) if row["sent"] else "",
            duration(row["communicating"]) if row["communicating"] else "",
            size(row["peak_bytes"]) if row["peak_bytes"] else "",
            f"{share:.0%}",
        )
        cells.append((plain(name, "bold" if share > 0.1 else ""), *numbers))
        if row.get("code"):
            cells.append((plain(f"  {row['code']}", "dim"),))
        cells += _within(row, sort)
        kinds = sorted(row["collectives"].items(), key=lambda item: -item[1]["bytes"])
        for kind, kept in kinds if by != "op" else ():
            sent = size(kept["bytes"]), duration(kept["seconds"])
            cells.append((plain(f"  {kept['count']:,} × {kind}", "cyan"), "", "", "", *sent, "", ""))
    table(out, [f"~{by}", ">ops", ">flops", ">compute", ">sends", ">collectives", ">at the peak", ">share"], cells)
    if len(rows) > _SHOWN:
        line(out, f"  and {count(len(rows) - _SHOWN, 'row')} more: --json has all")
