"""`--source`: the user's lines, and what each of them costs a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from monarch.compiler.cli.screen import amount, count, duration, heading, line, plain, size, table
from monarch.compiler.inspect.values import report_of, source_of
from monarch.compiler.plan import Plan


def data(plan: Plan) -> list[dict[str, Any]]:
    """For each line, by file and in order: its code, its ops, flops, estimated seconds, and its collectives with how
    many there are and their bytes."""
    report = report_of(plan)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for value in report.values:
        source = source_of(plan, value)
        if source is None or value.instruction < 0 or value.op == "getitem":
            continue
        entry = found.setdefault(
            (source.file, source.line),
            {
                "file": source.file,
                "line": source.line,
                "code": "",
                "ops": 0,
                "flops": 0.0,
                "moved": 0,
                "seconds": 0.0,
                "collectives": {},
            },
        )
        entry["code"] = entry["code"] or report.lines[value.source].strip()
        entry["ops"] += 1
        entry["flops"] += value.flops
        entry["moved"] += value.moved
        entry["seconds"] += value.seconds
        if value.mesh_dims:
            name = f"{value.op} over {','.join(value.mesh_dims)}"
            kept = entry["collectives"].setdefault(name, {"count": 0, "bytes": 0, "seconds": 0.0})
            kept["count"] += 1
            kept["bytes"] += value.sent
            kept["seconds"] += value.seconds
    return [found[key] for key in sorted(found)]


def _shown(file: str) -> str:
    """A file's path from where one is, if it lies below."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def show(out: Console, plan: Plan) -> None:
    rows = data(plan)
    total = sum(row["seconds"] for row in rows)
    heading(out, "your lines", f"what each costs a worker: estimated {duration(total)} in all", first=True)
    for file in dict.fromkeys(row["file"] for row in rows):
        line(out, plain(f"  {_shown(file)}", "underline"))
        cells: list[tuple[object, ...]] = []
        for row in rows:
            if row["file"] != file:
                continue
            share = row["seconds"] / total if total else 0.0
            cells.append(
                (
                    row["line"],
                    plain(row["code"] or "(the line could not be read)", "bold" if share > 0.1 else ""),
                    f"{row['ops']:,}",
                    amount(row["flops"]) if row["flops"] else "",
                    duration(row["seconds"]),
                    f"{share:.0%}",
                )
            )
            for name, kept in sorted(row["collectives"].items(), key=lambda item: -item[1]["bytes"]):
                text = Text("  ") + plain(f"{kept['count']:,} × {name}, {size(kept['bytes'])}", "cyan")
                cells.append(("", text, "", "", duration(kept["seconds"]), ""))
        table(out, [">line", "~code", ">ops", ">flops", ">estimated", ">share"], cells)
    if not rows:
        line(out, f"  none of {count(len(report_of(plan).values), 'value')} has a line of yours.")
