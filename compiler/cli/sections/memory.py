"""`--memory`: what a worker holds over the schedule, and what it holds at the peak."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import count, duration, heading, line, plain, size, table
from monarch.compiler.inspect.graphs import graphs_of
from monarch.compiler.inspect.values import kind_of, local_bytes, report_of, where
from monarch.compiler.plan import Plan, Value
from monarch.compiler.plan.report import PHASES, held, peak

_BARS = " ▁▂▃▄▅▆▇█"
_ROWS = 8
_COLUMNS = 80
_MOST_VALUES = 20

KINDS = ("weights", "optimizer state", "gradients", "inputs", "constants", *PHASES)
"""What a buffer holds: inputs and states by what they are, values by the phase that makes them."""

WAITING = "waiting"
"""What nothing reads any more and is not given back yet."""


def data(plan: Plan) -> dict[str, Any]:
    """`held` bytes after each value, `peak` bytes and the value where they are reached, and what is `alive` there, in
    bytes by layer and kind."""
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
        **({"kept_by_graphs": graphs_of(plan)["kept_bytes"]} if plan.cuda_graphs else {}),
    }


def limits_of(plan: Plan) -> tuple[int | None, Recomputed | None]:
    """The limit that a plan was compiled under, and what is computed again for it. `costs` is free JSON: what has not
    the form that the compiler gives it is left out."""
    limit, done = plan.options.memory_limit, plan.costs.get("recomputed")
    try:
        without, calls, seconds = int(done["without"]), int(done["calls"]), float(done["seconds"])  # type: ignore[index]
        values = [(str(name), int(saved), str(since), str(until)) for name, saved, since, until in done["values"]]  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError):
        return limit if type(limit) is int else None, None
    return limit if type(limit) is int else None, Recomputed(without, calls, seconds, values)


def arena_of(plan: Plan) -> str:
    """What there is to say of the arena; nothing where there is none, or `costs` does not tell how full it gets."""
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


def layer_of(module: str) -> str:
    """The layer that a module belongs to: `blocks.0` for `blocks.0.attn.q`, the first name where no number follows."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", module)
    return match[0] if match else module.partition(".")[0]


def alive(plan: Plan) -> list[tuple[Value, int]]:
    """The buffers alive at the peak: the value that took each, and its bytes, in the order of the schedule.

    A buffer lives from the value that takes it to the last reader of that value and of its views; inputs and results
    live to the end, states that the step replaces to its commit.
    """
    values = report_of(plan).values
    _, at = peak(plan)
    return [(values[buffer.made], buffer.size) for buffer in _buffers(plan) if buffer.made <= at <= buffer.last]


def alive_by_layer(plan: Plan) -> dict[str, dict[str, int]]:
    """The bytes alive at the peak, by layer and kind, in the order of the schedule. What the peak has beyond what a
    later value still needs is "waiting"."""
    found: dict[str, dict[str, int]] = {}
    for value, taken in alive(plan):
        kinds = found.setdefault(layer_of(value.module), {})
        kind = _kind(value)
        kinds[kind] = kinds.get(kind, 0) + taken
    most, _ = peak(plan)
    if (total := sum(sum(kinds.values()) for kinds in found.values())) != most:
        found.setdefault("", {})[WAITING] = most - total
    return found


@dataclass
class _Buffer:
    """Memory that a value takes: by number, the value that makes it and the last one that needs it."""

    size: int
    made: int
    last: int


def _buffers(plan: Plan) -> list[_Buffer]:
    """Every buffer of the plan; a value that takes none shares that of the first value that it reads."""
    values = report_of(plan).values
    outputs = {spec.slot for spec in plan.outputs}
    replaced = {str(s.label) for s, donated in zip(plan.inputs, plan.donated, strict=True) if donated}
    commit = next((at for at, i in enumerate(plan.instructions) if i.op == "commit"), len(plan.instructions))
    committed = sum(1 for value in values if value.instruction < commit) - 1
    made: list[_Buffer] = []
    of: list[list[_Buffer]] = []
    for number, value in enumerate(values):
        if value.allocates:
            sizes = [0 if type_ is None else local_bytes(type_, plan.mesh) for type_ in value.types]
            over = _written_over(plan, value)
            if len(over) != len(sizes) or not all(of[at] for at in over if at >= 0):
                over = [-1] * len(sizes)
            fresh = [size_ for size_, at in zip(sizes, over, strict=True) if at < 0]
            if sum(fresh) != value.allocates:
                sizes, over = [value.allocates], [-1]
            own = [_Buffer(s, number, number) if at < 0 else of[at][0] for s, at in zip(sizes, over, strict=True)]
            made += [buffer for buffer in own if buffer.made == number]
        elif value.reads and value.instruction >= 0:
            own = of[value.reads[0]]
            element = re.fullmatch(r"getitem\(%\w+, (\d{1,9})\)", value.call, re.ASCII)
            if element and int(element[1]) < len(own) > 1:
                own = [own[int(element[1])]]
        else:
            own = []
        of.append(own)
        end = _end(plan, value, committed, replaced, outputs)
        for buffer in own:
            buffer.last = max(buffer.last, number, end)
        for operand in value.reads if value.op != "getitem" else ():
            for buffer in of[operand]:
                buffer.last = max(buffer.last, number)
    return made


def _written_over(plan: Plan, value: Value) -> list[int]:
    """For each result of a generated kernel the value in whose memory it lies, by number, or -1; [] for other ops."""
    if value.instruction < 0 or (instruction := plan.instructions[value.instruction]).op != "kernel":
        return []
    operands, _, over = instruction.args
    return [value.reads[at] if at >= 0 else -1 for at in over] if len(operands) == len(value.reads) else []


def _end(plan: Plan, value: Value, committed: int, replaced: Collection[str], outputs: Collection[int]) -> int:
    """Until which value a worker keeps a buffer whoever reads it: inputs and results to the end, states that the step
    replaces to the commit."""
    if value.instruction >= 0:
        return sys.maxsize if plan.instructions[value.instruction].out in outputs else -1
    if value.op in ("scalar", "seed"):
        return -1
    return committed if value.op == "state" and _label(value.call) in replaced else sys.maxsize


def _kind(value: Value) -> str:
    if value.op == "state":
        return kind_of(_label(value.call))
    if value.instruction >= 0:
        return value.phase
    return "inputs" if value.op == "input" else "constants"


def _label(call: str) -> str:
    match = re.fullmatch(r'state (".*")', call)
    try:
        return str(json.loads(match[1])) if match else ""
    except ValueError:  # a plan's text is anybody's
        return ""


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
    """The layers with what each holds; many alike that follow one another are one row."""
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
    is what is held before anything runs."""
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
