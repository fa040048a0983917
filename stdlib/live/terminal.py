"""`monarch top`: the content of the live page, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from monarch.compiler.sizes import format_bytes

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 30
"""So many characters a curve takes."""
_FAILURES = 5
_ACTORS = 20


def spark(values: Sequence[float | None]) -> str:
    """Numbers as bars of a character each, from the least to the most; of many, the means of equal parts."""
    known = [value for value in values if value is not None]
    if len(known) > _WIDTH:
        cuts = [at * len(known) // _WIDTH for at in range(_WIDTH + 1)]
        known = [sum(known[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    if not known:
        return ""
    low, step = min(known), (max(known) - min(known)) / (len(_BARS) - 1)
    return "".join(_BARS[round((value - low) / step)] if step else _BARS[0] for value in known)


def render(seen: Mapping[str, Any]) -> RenderableType:
    """A snapshot (`watching.Watch.snapshot`) for a terminal."""
    program = seen["program"]
    about = f"process {program['pid']} on {program['host']}", _time(program["seconds"]), format_bytes(program["memory"])
    parts: list[RenderableType] = [Text(_clean("  ".join([program["name"], *about])), "bold")]
    if seen["meshes"]:
        table = _table("MESH", "PROGRAM", ">STEPS", ">STEPS/S", ">QUEUE", ">MEMORY", "LAST TWO MINUTES")
        for mesh in seen["meshes"]:
            what = mesh["program"] if mesh["running"] else "ended"
            memory = format_bytes(sum(mesh["memory"])) if mesh["memory"] else ""
            numbers = f"{mesh['steps']:,}", f"{mesh['rate']:.1f}", str(mesh["queue"]), memory
            table.add_row(*map(_text, (mesh["name"], what, *numbers, spark(mesh["rates"]))))
        parts.append(table)
    if seen["logs"]:
        table = _table("LOGGED", ">STEP", ">VALUE", "CURVE")
        for name, points in seen["logs"].items():
            step, value = points[-1]
            last = "not a number" if value is None else f"{value:.5g}"
            table.add_row(*map(_text, (name, step, last, spark([point[1] for point in points]))))
        parts.append(table)
    if seen["processes"]:
        table = _table("PROCESS", ">PID", ">MEMORY", "ACTOR", ">QUEUED", "RUNS")
        rows = [row for process in seen["processes"] for row in _rows(process)]
        for row in rows[:_ACTORS]:
            table.add_row(*map(_text, row))
        parts.append(table)
        if len(rows) > _ACTORS:
            parts.append(Text(f"and {len(rows) - _ACTORS} more", "dim"))
    for failure in seen["failures"][:_FAILURES]:
        at = datetime.fromtimestamp(failure["time"]).strftime("%H:%M:%S")
        parts.append(Text(f"{at}  {_clean(failure['what'])}: {_clean(failure['summary'])}", "red"))
    if seen["failed"] > _FAILURES:
        parts.append(Text(f"the last {_FAILURES} of {seen['failed']:,} failures", "dim"))
    return Group(*parts)


def _rows(process: Mapping[str, Any]) -> list[tuple[object, ...]]:
    first = process["name"], process["pid"] or "", format_bytes(process["memory"]) if process["memory"] else ""
    if not process["answers"]:
        return [(*first, "does not answer", "", "")]
    rows = [(actor["name"], actor["queued"], ", ".join(actor["running"])) for actor in process["actors"]]
    return [(*(first if at == 0 else ("", "", "")), *row) for at, row in enumerate(rows or [("", "", "")])]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    return table


def _text(value: object) -> Text:
    return Text(_clean(str(value)))


def _clean(text: str) -> str:
    """Without bytes that a terminal would take for a command."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
