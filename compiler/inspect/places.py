"""A line of the user's, or a module, in the plan: its costs, and why it has each of its collectives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.inspect.values import further_results, line_of, report_of, source_of, types_text
from monarch.compiler.inspect.why import Explanation, explain, named, near
from monarch.compiler.sizes import format_bytes, format_seconds

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan
    from monarch.compiler.plan.report import Collectives, ReportedValue

_SHOWN = 12
"""So many collectives (or, where there are none, values) of a place the text shows, the dearest first."""


@dataclass(frozen=True)
class PlaceExplanation:
    """What `explain_any` found at a line or in a module.

    `name`         as asked for: `train.py:58`, `layers.0.mlp`
    `code`         the line's text ("" for a module, and where it is not known)
    `ops`          how many ops it became, with `flops` and estimated seconds of a worker (`computing`)
    `sent`         the bytes that a worker sends in its collectives, with their estimated seconds (`communicating`)
    `collectives`  each with why it is there, the dearest first
    `within`       those that its loops and branches run, by kind
    `values`       what it computes, as `%name : type`, in the order of the schedule
    """

    name: str
    code: str
    ops: int
    flops: float
    computing: float
    sent: int
    communicating: float
    collectives: tuple[Explanation, ...]
    within: tuple[Collectives, ...]
    values: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(_text(self))


def _text(place: PlaceExplanation) -> list[str]:
    met = place.collectives
    many = len(met) + sum(each.count for each in place.within)
    lines = [f"{place.name}: {place.code}" if place.code else place.name]
    lines.append(f"  {_count(place.ops, 'op')}: a worker computes for {format_seconds(place.computing)} (estimated)")
    if not many:
        lines += ["  no collective: no worker needs anything of another here", ""]
        lines += [f"  {value}" for value in place.values[:_SHOWN]]
        if len(place.values) > _SHOWN:
            lines.append(f"  and {len(place.values) - _SHOWN:,} more")
        return lines
    sent, took = format_bytes(place.sent), format_seconds(place.communicating)
    lines.append(f"  {_count(many, 'collective')}: a worker sends {sent} in {took} (estimated)")
    for inner in place.within:
        over = f"{inner.count:,} × {inner.op} over {','.join(inner.mesh_dims)}"
        lines += ["", f"  {over}, {format_bytes(inner.sent)}, {format_seconds(inner.seconds)}, in a loop or a branch"]
    for each in met[:_SHOWN]:
        over = f"{each.call.partition('(')[0]} over {','.join(each.mesh_dims)}"
        lines += ["", f"  %{each.name}: {over}, {format_bytes(each.sent)}, {format_seconds(each.seconds)}"]
        lines[-1] += f", in {each.module}" if each.module else ""
        whys = list(dict.fromkeys(moved.why for moved in each.moved if moved.why)) or [each.why]
        lines += [f"    {why}" for why in whys[:2] if why]
        if len(whys) > 2:
            lines.append(f"    and so on, for {len(whys)} tensors that travel together")
    if len(met) > _SHOWN:
        lines += ["", f"  and {_count(len(met) - _SHOWN, 'collective')} more"]
    return [*lines, "", f"  the full explanation of one: --why {met[0].name}"] if met else lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def explain_any(plan: Plan, what: str) -> Explanation | PlaceExplanation:
    """Why a value has its layout (`mm_3`, `layers.0.mlp.weight`; see `explain`), or the ops of a line (`train.py:58`)
    or a module (`layers.0.mlp`, with those in it), and why it has its collectives.

    Raises MonarchError, with near names, where the plan has nothing of that name, and where it has no report.
    """
    report = report_of(plan)
    wanted = what.strip()
    if named(report, wanted.removeprefix("%")):
        return explain(plan, wanted)
    belongs = _of_line(plan, wanted) or _of_module(wanted)
    values = [
        value
        for value in report.values
        if value.instruction >= 0 and value.op not in ("getitem", "kernel") and belongs(value)
    ]
    if not values:
        raise MonarchError(f"plan '{plan.name}' has no value, line or module {wanted[:80]!r}", hint=_near(plan, wanted))
    again = further_results(plan, values)
    met = sorted((value for value in values if value.collectives), key=lambda value: (-value.seconds, -value.sent))
    source = source_of(plan, values[0])
    code = "" if source is None or not re.search(r":\d+$", wanted) else line_of(plan, _asked(source, wanted))
    return PlaceExplanation(
        name=wanted,
        code=code,
        ops=len(values) - len(again),
        flops=sum(value.flops for value in values),
        computing=sum(value.computing for value in values),
        sent=sum(value.sent for value in met),
        communicating=sum(value.communicating for value in met),
        collectives=tuple(explain(plan, value.name) for value in met if value.mesh_dims),
        within=tuple(each for value in met for each in value.within),
        values=tuple(f"%{value.name} : {types_text(value)}" for value in values if not value.mesh_dims),
    )


def _of_module(module: str) -> Callable[[ReportedValue], bool]:
    return lambda value: value.module == module or value.module.startswith(f"{module}.")


def _asked(source: Source, text: str) -> Source:
    """Of a library's line and the one that called it, that which a text names."""
    return source if text.endswith(f":{source.line}") and source.file.endswith(text.rpartition(":")[0]) else source.own


def _of_line(plan: Plan, text: str) -> Callable[[ReportedValue], bool] | None:
    """Whether a value is of the line that a text like `train.py:58` names, or of one of a library that it called; None
    for another text."""
    match = re.fullmatch(r"(.+):(\d{1,9})", text)
    if match is None:
        return None
    file, line = match[1], int(match[2])

    def belongs(value: ReportedValue) -> bool:
        source = source_of(plan, value)
        places = () if source is None else (source, source.own)
        return any(at.line == line and (at.file == file or at.file.endswith(f"/{file}")) for at in places)

    return belongs


def _near(plan: Plan, wanted: str) -> str:
    """A hint: near names of values, states and modules, or the lines of the file that have values."""
    report = report_of(plan)
    if match := re.fullmatch(r"(.+):(\d{1,9})", wanted):
        lines = {
            source.line
            for value in report.values
            if (source := source_of(plan, value)) is not None
            and source.file.rpartition("/")[2] == match[1].rpartition("/")[2]
        }
        if lines:
            nearest = sorted(sorted(lines, key=lambda line: abs(line - int(match[2])))[:3])
            return f"lines of {match[1]} that became something: {', '.join(map(str, nearest))} are the nearest."
        files = dict.fromkeys(source.file.rpartition("/")[2] for source in plan.sources)
        return f"the plan's lines are of {', '.join(files) or 'no file'}."
    return near(report, wanted, (value.module for value in report.values if value.module))
