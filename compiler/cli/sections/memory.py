"""`--memory`: a worker's bytes over the schedule, and the values that have them at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import count, duration, heading, line, plain, size, table
from monarch.compiler.inspect.graphs import graphs_of
from monarch.compiler.inspect.memory import KINDS, WAITING, alive_by_layer
from monarch.compiler.inspect.values import report_of, where
from monarch.compiler.plan import Plan
from monarch.compiler.plan.report import PHASES, held, peak
from monarch.compiler.survival import Cluster, Copies, copies_for

_BARS = " ▁▂▃▄▅▆▇█"
_ROWS = 8
_COLUMNS = 80
_MOST_VALUES = 20


def data(plan: Plan) -> dict[str, Any]:
    """`held` bytes after each value, `peak` bytes and the value where they are reached, and the values that are `alive`
    there, in bytes by layer and kind."""
    most, at = peak(plan)
    value = report_of(plan).values[at] if at >= 0 else None
    return {
        "peak": most,
        "at": at,
        "value": value.name if value else "",
        "where": where(plan, value) if value else "",
        "phase": value.phase if value else "",
        "held": held(plan),
        "alive": alive_by_layer(plan),
        "limit": plan.options.memory_limit,
        "recomputed": plan.costs.get("recomputed"),
        "arena": plan.costs.get("arena"),
        **({"copies": copies_of(plan).memory} if plan.options.redundancy else {}),
        **({"kept_by_graphs": graphs_of(plan)["kept_bytes"]} if plan.cuda_graphs else {}),
    }


def copies_of(plan: Plan) -> Copies:
    """Copies that workers keep for one another with `redundancy=1`, on one host."""
    return copies_for(plan.states, Cluster(plan.mesh))


def limits_of(plan: Plan) -> tuple[int | None, Recomputed | None]:
    """The limit that a plan was compiled under, and the values that are computed again for it. `costs` is free JSON:
    entries of another form than the compiler's are left out."""
    limit, done = plan.options.memory_limit, plan.costs.get("recomputed")
    try:
        without, calls, seconds = int(done["without"]), int(done["calls"]), float(done["seconds"])  # type: ignore[index]
        values = [(str(name), int(saved), str(since), str(until)) for name, saved, since, until in done["values"]]  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError):
        return limit if type(limit) is int else None, None
    return limit if type(limit) is int else None, Recomputed(without, calls, seconds, values)


def arena_of(plan: Plan) -> str:
    """A description of the arena; nothing where there is none, or `costs` does not say how full it gets."""
    costs = plan.costs.get("arena")
    least, values = (costs.get("least"), costs.get("values")) if isinstance(costs, dict) else (None, None)
    if type(least) is not int or type(values) is not int or not 0 < least <= plan.arena:
        return ""
    more = plan.arena / least - 1
    unused = f"{more:.1%} more than they need at once" if more else "as much as they need at once"
    return f"{count(values, 'value')} in an arena of {size(plan.arena)}, {unused}"


@dataclass(frozen=True)
class Recomputed:
    """The peak in bytes without it, how many ops are made again and their estimated seconds; for each value that was
    given up its name, bytes, and the values between which these are free."""

    without: int
    calls: int
    seconds: float
    values: list[tuple[str, int, str, str]]


def show(out: Console, plan: Plan) -> None:
    found = data(plan)
    limit, done = limits_of(plan)
    most = f"at most {size(found['peak'])}"
    if limit is not None:
        most += f", under a limit of {size(limit)}"
    if done is not None and done.calls:
        most += f"; it would be {size(done.without)} if nothing were computed again"
    heading(out, "memory of a worker", most, first=True)
    placed = sum(1 for value in report_of(plan).values if value.instruction < 0)
    for text in curve(found["held"][max(0, placed - 1) :], found["peak"]):
        line(out, text)
    line(out, plain(f"{'':11}{_phases(plan)}", "dim"))
    if found["value"]:
        place = f", {found['where']}" if found["where"] else ""
        line(out, f"  the peak is at %{found['value']}{place} ({found['phase']})")
    if arena := arena_of(plan):
        line(out, f"  {arena}")
    if plan.options.redundancy:
        line(out, f"  copies for redundancy=1 take at most {size(found['copies'])} more")
    if plan.cuda_graphs:
        line(out, f"  CUDA graphs keep at most {size(found['kept_by_graphs'])} more, for what they read and leave,")
        line(out, "  and between steps what they need while they run")
    kinds = [kind for kind in (*KINDS, WAITING) if any(kind in row for row in found["alive"].values())]
    heading(out, "alive at the peak")
    table(
        out,
        ["~layer", *(f">{kind.removesuffix(' state')}" for kind in kinds), ">together"],
        [
            (layer, *(size(row[kind]) if kind in row else "" for kind in kinds), size(sum(row.values())))
            for layer, row in grouped(found["alive"])
        ],
    )
    if done is not None and done.calls:
        _show_recomputed(out, done)


def _show_recomputed(out: Console, done: Recomputed) -> None:
    heading(out, "computed again, not kept", f"{count(done.calls, 'op')}, about {duration(done.seconds)} more a step")
    rows = [(f"%{name}", size(saved), f"%{since}", f"%{until}") for name, saved, since, until in done.values]
    table(out, ["~value", ">saves", "~behind", "~until"], rows[:_MOST_VALUES])
    if len(rows) > _MOST_VALUES:
        line(out, f"  and {count(len(rows) - _MOST_VALUES, 'value')} more: --json has all")


def grouped(alive: dict[str, dict[str, int]]) -> Iterator[tuple[str, dict[str, int]]]:
    """The layers with the bytes of each; many alike that follow one another are one row."""
    for _, group in groupby(alive.items(), key=lambda item: sorted(item[1].items())):
        rows = list(group)
        if len(rows) > 3:
            first, last = rows[0][0], rows[-1][0]
            same = first.rpartition(".")[0] == last.rpartition(".")[0]
            yield f"{first} to {last.rpartition('.')[2] if same else last}, each", rows[0][1]
        else:
            yield from ((layer or "(no module)", row) for layer, row in rows)


def curve(heights: list[int], most: int) -> list[str]:
    """A plot of some numbers, in eighths of a character: each column is the most of its part of the schedule. The first
    is the memory before anything runs."""
    if not heights or not most:
        return []
    wide = min(_COLUMNS, len(heights))
    columns = [
        max(heights[len(heights) * at // wide : max(len(heights) * (at + 1) // wide, len(heights) * at // wide + 1)])
        for at in range(wide)
    ]
    lines = []
    for row in range(_ROWS, 0, -1):
        bars = "".join(_BARS[max(0, min(8, round(height / most * _ROWS * 8) - (row - 1) * 8))] for height in columns)
        label = size(most) if row == _ROWS else size(most / 2) if row == _ROWS // 2 else ""
        lines.append(f"{label:>10} {bars}".rstrip())
    return lines


def _phases(plan: Plan) -> str:
    """The phases' names below the parts of the plot where they begin."""
    values = [value for value in report_of(plan).values if value.instruction >= 0]
    wide = min(_COLUMNS, len(values) + 1)
    shown = [" "] * wide
    for phase in PHASES:
        first = next((number for number, value in enumerate(values, 1) if value.phase == phase), None)
        if first is not None:
            start = first * wide // (len(values) + 1)
            for at, letter in enumerate(f"└{phase}"):
                if start + at < wide:
                    shown[start + at] = letter
    return "".join(shown).rstrip()
