"""`--kernels`: what runs on a worker, by kernel: ATen's, generated ones, collectives."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import count, duration, heading, line, plain, table
from monarch.compiler.inspect.values import kernel_name, kernel_of, report_of
from monarch.compiler.plan import OPS, Plan


def data(plan: Plan) -> list[dict[str, Any]]:
    """For each kernel who wrote it, how often it is called, the estimate for all its calls, and the text of a generated
    one; the dearest first."""
    found: dict[str, dict[str, Any]] = {}
    for value in report_of(plan).values:
        if value.instruction < 0:
            continue
        name = plan.instructions[value.instruction].op
        text = kernel_of(plan, value)
        if name == "getitem" or (name == "kernel" and not text):
            continue
        by = (
            "generated"
            if text
            else "ATen"
            if name.startswith("aten.")
            else "collective"
            if value.mesh_dims
            else "Monarch"
            if name in OPS
            else "user"
        )
        # Kernels of one name can differ: their texts, without the lines that they stem from, tell them apart.
        name = kernel_name(text) if text else name
        key = re.sub(r"  # .*", "", text) or name
        entry = found.setdefault(
            key, {"kernel": name, "by": by, "calls": 0, "seconds": 0.0, "values": [], "text": text}
        )
        entry["values"].append(value.name)
        entry["calls"] += 1
        entry["seconds"] += value.seconds
    return sorted(found.values(), key=lambda entry: (-entry["seconds"], -entry["calls"], entry["kernel"]))


def show(out: Console, plan: Plan) -> None:
    rows = data(plan)
    generated = sum(row["by"] == "generated" for row in rows)
    made = f"{generated:,} of them generated" if generated else "none of them generated"
    heading(out, "kernels", f"{count(len(rows), 'kernel')}, {made}", first=True)
    table(
        out,
        ["~kernel", "by", ">calls", ">estimated"],
        [(row["kernel"], row["by"], f"{row['calls']:,}", duration(row["seconds"])) for row in rows],
    )
    if generated:
        first = next(row for row in rows if row["by"] == "generated")
        line(out, plain(f"  the text of one: --why {first['values'][0]}", "dim"))
