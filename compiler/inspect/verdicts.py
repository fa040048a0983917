"""Verdicts on a plan, a sentence each: does it fit, which work is done several times, what do workers wait for.

Each verdict is found in the plan's report; nothing runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from monarch.compiler.inspect.estimate import Estimate
from monarch.compiler.inspect.memory import alive
from monarch.compiler.inspect.values import computed, kind_of, report_of, where
from monarch.compiler.plan import Plan
from monarch.compiler.plan.report import ReportedValue
from monarch.compiler.sizes import format_bytes, format_seconds

_SMALL = 0.05
"""A part of a step, or of the memory, too small to mention."""
_NAMED = 3

_NOUNS = (
    (r"aten\.(mm|bmm|addmm|baddbmm|addmv|mv|dot|_grouped_mm)\b", "product"),
    (r"aten\..*convolution", "convolution"),
    (r"aten\..*scaled_dot_product", "attention"),
)
"""The names of the ops in which models spend their time."""


@dataclass(frozen=True)
class Verdict:
    """`state` is "good", "note" (it costs something) or "bad"; `text` a sentence, `do` a way to improve it ("" for
    none); `value` the name of a value to look at, "" for none."""

    state: Literal["good", "note", "bad"]
    text: str
    do: str = ""
    value: str = ""


@dataclass(frozen=True)
class Room:
    """The memory of a worker of `machine` ("" for a given limit), in bytes."""

    machine: str
    bytes: int


def room_of(plan: Plan) -> Room | None:
    """The memory that a plan's worker may take: that of the machine that it was compiled for, or its limit; None
    without either. `costs` is free JSON: entries of another form than the compiler's are left out."""
    machine = plan.costs.get("machine")
    if isinstance(machine, dict) and isinstance(machine.get("name"), str) and type(machine.get("memory")) is int:
        return Room(machine["name"], machine["memory"])
    return None if plan.options.memory_limit is None else Room("", plan.options.memory_limit)


def verdicts(plan: Plan, found: Estimate) -> tuple[Verdict, ...]:
    """The most important first. Raises MonarchError for a plan without a report."""
    found_here = *_whole_states(plan, found), *_repeated(plan, found), *_gathered(plan), *_waits(found)
    return (*_fits(plan, found), *_rounds(plan), *found_here, *_not_measured(plan))


def _rounds(plan: Plan) -> Iterator[Verdict]:
    """How often a while_loop goes round is not known before."""
    if any(instruction.op == "while_loop" for each in _with_functions(plan) for instruction in each.instructions):
        found = next(value for value in report_of(plan).values if value.op in ("cond", "while_loop", "scan"))
        yield Verdict(
            "note",
            "a while_loop is in these numbers with one round, for their number is unknown",
            "measure it: monarchc profile",
            found.name,
        )


def _with_functions(plan: Plan) -> Iterator[Plan]:
    yield plan
    for function in plan.functions.values():
        yield from _with_functions(function)


def _not_measured(plan: Plan) -> Iterator[Verdict]:
    """Estimates for CPUs were compared with measured steps (docs/measured), and others with none."""
    if plan.target != "cpu":
        yield Verdict(
            "note",
            f"seconds for {plan.target} are bounds from data sheets that no GPU has confirmed: trust bytes, counts and "
            "their order",
            "measure what you build on: monarchc profile",
        )


def _fits(plan: Plan, found: Estimate) -> Iterator[Verdict]:
    if (room := room_of(plan)) is None:
        return
    of = f"{room.machine}: " if room.machine else "the limit: "
    held, there = format_bytes(found.peak), format_bytes(room.bytes)
    if found.peak <= room.bytes:
        yield Verdict("good", f"fits {of}a worker holds {held} of {there}")
    else:
        yield Verdict(
            "bad",
            f"does not fit {of}a worker holds {held}, and there are {there}",
            "have values computed again rather than kept (memory_limit=), shard the states, or give each worker less "
            "of the batch",
        )


def _whole_states(plan: Plan, found: Estimate) -> Iterator[Verdict]:
    """Weights and optimizer states of which all workers along a mesh dim hold the same."""
    for dim, size in plan.mesh.dims:
        held: Counter[str] = Counter()
        for value, taken in alive(plan):
            type_ = value.types[0] if value.op == "state" else None
            if type_ is not None and type_.layout.placement(dim) is None:
                held[kind_of(value.call.partition(" ")[2].strip('"'))] += taken
        total = sum(held.values())
        if size == 1 or total <= max(0.25 * found.peak, 1 << 20):
            continue
        kinds = " and ".join(kind for kind, _ in held.most_common(2))
        yield Verdict(
            "note",
            f"{kinds} of {format_bytes(total)} are whole on each of the {size} workers along {dim}",
            f"fully_shard over {dim} leaves {format_bytes(total / size)} of them on each",
        )


@dataclass
class _Work:
    seconds: float = 0.0
    calls: int = 0
    value: ReportedValue | None = None


def _repeated(plan: Plan, found: Estimate) -> Iterator[Verdict]:
    """The ops that several workers compute alike: those with a rule that no factor shards on a mesh dim."""
    work: dict[tuple[tuple[str, ...], str], _Work] = {}
    for value in computed(plan):
        is_view = not value.flops and not value.allocates
        if value.mesh_dims or is_view or not (dims := _alike_over(plan, value)):
            continue
        kept = work.setdefault((dims, _what(value)), _Work())
        kept.seconds += value.seconds
        kept.calls += 1
        kept.value = kept.value or value
    rest: dict[tuple[str, ...], Counter[str]] = {}
    for (dims, what), kept in sorted(work.items(), key=lambda item: -item[1].seconds):
        times, workers = _times(plan, dims)
        if kept.value is None:
            continue
        noun = next((noun for pattern, noun in _NOUNS if re.match(pattern, kept.value.op)), "")
        if not noun or kept.seconds < _SMALL * found.computing:
            rest.setdefault(dims, Counter())[what] += round(kept.seconds * 1e9)
            continue
        line = where(plan, kept.value)
        if kept.calls > 1 and noun != "attention":
            what = f"{what.replace(noun, f'{noun}s', 1)}{f' ({line})' if line else ''} are"
        else:
            what = f"{what}{f' ({line})' if line else ''} is"
        yield Verdict(
            "note",
            f"{what} done {times} times, by {workers}: "
            f"{format_seconds(kept.seconds)}, {kept.seconds / found.computing:.0%} of what a worker computes",
            "shard its weight over " + " or ".join(dims),
            kept.value.name,
        )
    for dims, parts in rest.items():
        share = sum(parts.values()) / 1e9 / found.computing if found.computing else 0.0
        if share < 2 * _SMALL:
            continue
        times, workers = _times(plan, dims)
        named = ", ".join(what for what, _ in parts.most_common(_NAMED))
        yield Verdict(
            "note",
            f"{share:.0%} of what a worker computes is done {times} times, by {workers}: {named}"
            + (" and others" if len(parts) > _NAMED else ""),
        )


def _alike_over(plan: Plan, value: ReportedValue) -> tuple[str, ...]:
    """The mesh dims along which all workers compute the same for a value."""
    types = [type_ for type_ in value.types if type_ is not None]
    return tuple(
        each.mesh_dim
        for each in value.decisions
        if each.rule
        and not each.factor
        and plan.mesh.sizes[each.mesh_dim] > 1
        and all(type_.layout.placement(each.mesh_dim) is None for type_ in types)
    )


def _times(plan: Plan, dims: tuple[str, ...]) -> tuple[int, str]:
    """How often, and by which workers: 8, "every worker along data and model"."""
    return math.prod(plan.mesh.sizes[dim] for dim in dims), f"every worker along {' and '.join(dims)}"


def _what(value: ReportedValue) -> str:
    """`the products of head`, `the update`, `native_layer_norm`."""
    if value.phase == "update":
        return "the optimizer's update"
    noun = next((noun for pattern, noun in _NOUNS if re.match(pattern, value.op)), "")
    module = re.sub(r"(?<![^.])\d+(?![^.])", "*", value.module)
    if noun:
        return f"the {noun} of {module}" if module else f"a {noun}"
    return value.op.removeprefix("aten.").partition(".")[0]


def _gathered(plan: Plan) -> Iterator[Verdict]:
    """Activations that are gathered more than once. A sharded weight is gathered again so as not to keep it."""
    values = report_of(plan).values
    met: dict[tuple[int, tuple[str, ...]], list[ReportedValue]] = {}
    for value in values:
        if value.op != "all_gather":
            continue
        for read in value.reads:
            root = _made(values, read)
            if values[root].instruction >= 0:
                met.setdefault((root, value.mesh_dims), []).append(value)
    again = [(values[root], dims, gathers) for (root, dims), gathers in met.items() if len(gathers) > 1]
    for value, dims, gathers in sorted(again, key=lambda item: -sum(each.sent for each in item[2]))[:_NAMED]:
        of = f"{value.module}'s %{value.name}" if value.module else f"%{value.name}"
        line = where(plan, value)
        yield Verdict(
            "note",
            f"{of}{f' ({line})' if line else ''} is gathered {_often(len(gathers))} over {','.join(dims)}: "
            f"{format_bytes(sum(each.sent for each in gathers))}",
            "give it one layout with monarch.layout where both need it whole",
            gathers[1].name,
        )


def _made(values: tuple[ReportedValue, ...], number: int) -> int:
    """The value of which one is a view."""
    while (value := values[number]).instruction >= 0 and not value.allocates and len(value.reads) == 1:
        if value.mesh_dims or value.kernel >= 0:
            break
        number = value.reads[0]
    return number


def _often(times: int) -> str:
    return "twice" if times == 2 else f"{times} times"


def _waits(found: Estimate) -> Iterator[Verdict]:
    for dims, seconds in sorted(found.waiting.items(), key=lambda item: -item[1]):
        if not found.seconds or (share := seconds / found.seconds) < 2 * _SMALL:
            continue
        hidden = found.communicating.get(dims, 0.0) - seconds
        beside = f"; {format_seconds(hidden)} more pass while it computes" if hidden > 1e-9 else ""
        yield Verdict(
            "note" if share < 0.4 else "bad",
            f"a worker waits for what moves over {dims} for {format_seconds(seconds)}, {share:.0%} of a step{beside}",
        )
