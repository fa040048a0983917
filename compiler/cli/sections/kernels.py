"""`--kernels`: what runs on a worker, by kernel. All kernels are ATen's own for now."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import count, duration, heading, table
from monarch.compiler.inspect.values import report_of
from monarch.compiler.plan import OPS, Plan


def data(plan: Plan) -> list[dict[str, Any]]:
    """For each kernel who wrote it, how often it is called, and the estimate for all its calls; the dearest first."""
    found: dict[str, dict[str, Any]] = {}
    for value in report_of(plan).values:
        if value.instruction < 0:
            continue
        name = plan.instructions[value.instruction].op
        if name == "getitem":
            continue
        by = (
            "ATen"
            if name.startswith("aten.")
            else "collective"
            if value.mesh_dims
            else "Monarch"
            if name in OPS
            else "user"
        )
        entry = found.setdefault(name, {"kernel": name, "by": by, "calls": 0, "seconds": 0.0})
        entry["calls"] += 1
        entry["seconds"] += value.seconds
    return sorted(found.values(), key=lambda entry: (-entry["seconds"], -entry["calls"], entry["kernel"]))


def show(out: Console, plan: Plan) -> None:
    rows = data(plan)
    heading(out, "kernels", f"{count(len(rows), 'kernel')}, none of them generated", first=True)
    table(
        out,
        ["~kernel", "by", ">calls", ">estimated"],
        [(row["kernel"], row["by"], f"{row['calls']:,}", duration(row["seconds"])) for row in rows],
    )
