"""`--ops`: what a worker computes, by op."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import amount, count, duration, heading, size, table
from monarch.compiler.inspect.values import computed, further_results
from monarch.compiler.plan import Plan
from monarch.compiler.plan.report import PHASES


def data(plan: Plan) -> list[dict[str, Any]]:
    """For each op how often it runs (in all, and by phase), and what that costs a worker; the dearest first."""
    found: dict[str, dict[str, Any]] = {}
    values = computed(plan)
    again = further_results(values)
    for number, value in enumerate(values):
        entry = found.setdefault(
            value.op, {"op": value.op, "count": 0, **dict.fromkeys(PHASES, 0), "flops": 0.0, "moved": 0, "seconds": 0.0}
        )
        entry["count"] += number not in again
        entry[value.phase] += number not in again
        entry["flops"] += value.flops
        entry["moved"] += value.moved
        entry["seconds"] += value.seconds
    return sorted(found.values(), key=lambda entry: (-entry["seconds"], -entry["count"], entry["op"]))


def show(out: Console, plan: Plan) -> None:
    rows = data(plan)
    total = count(sum(row["count"] for row in rows), "op")
    heading(out, "ops", f"{total} of {count(len(rows), 'kind')}, of one worker", first=True)
    table(
        out,
        ["~op", ">count", ">forward", ">backward", ">update", ">flops", ">bytes moved", ">estimated"],
        [
            (
                row["op"],
                f"{row['count']:,}",
                *(f"{row[phase]:,}" if row[phase] else "" for phase in PHASES),
                amount(row["flops"]) if row["flops"] else "",
                size(row["moved"]) if row["moved"] else "",
                duration(row["seconds"]),
            )
            for row in rows
        ],
    )
