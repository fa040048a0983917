"""The buffers that a worker holds when it holds most, from the plan's report."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch.compiler.inspect.values import kind_of, local_bytes, report_of
from monarch.compiler.plan.report import PHASES, peak

if TYPE_CHECKING:
    from monarch.compiler.plan.plan import Plan
    from monarch.compiler.plan.report import ReportedValue

KINDS = ("weights", "optimizer state", "gradients", "inputs", "constants", *PHASES)
"""Kinds of buffers: inputs and states by their kind, values by the phase that makes them."""

WAITING = "waiting"
"""Bytes that nothing reads any more and that are not given back yet."""


_WITH_REGIONS = ("cond", "while_loop", "scan")


def layer_of(module: str) -> str:
    """The layer that a module belongs to: `blocks.0` for `blocks.0.attn.q`, the first name where no number follows."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", module)
    return match[0] if match else module.partition(".")[0]


def alive(plan: Plan) -> list[tuple[ReportedValue, int]]:
    """The buffers alive at the peak: the value that took each, and its bytes, in the order of the schedule.

    A buffer lives from the value that takes it to the last reader of that value and of its views; inputs and results
    live to the end, states that the step replaces to its commit.
    """
    values = report_of(plan).values
    _, at = peak(plan)
    return [(values[buffer.made], buffer.size) for buffer in _buffers(plan) if buffer.made <= at <= buffer.last]


def alive_by_layer(plan: Plan) -> dict[str, dict[str, int]]:
    """The bytes alive at the peak, by layer and kind, in the order of the schedule. Bytes of the peak that no later
    value needs are "waiting"."""
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
            taken = value.allocates
            if value.op in _WITH_REGIONS and sum(sizes) < taken:  # its branch or rounds need the rest
                made.append(_Buffer(taken - sum(sizes), number, number))
                taken = sum(sizes)
            over = _written_over(plan, value)
            if len(over) != len(sizes) or not all(of[at] for at in over if at >= 0):
                over = [-1] * len(sizes)
            fresh = [size_ for size_, at in zip(sizes, over, strict=True) if at < 0]
            if sum(fresh) != taken:
                sizes, over = [taken], [-1]
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


def _written_over(plan: Plan, value: ReportedValue) -> list[int]:
    """For each result of a generated kernel the value whose memory it takes, by number, or -1; [] for other ops."""
    if value.instruction < 0 or (instruction := plan.instructions[value.instruction]).op != "kernel":
        return []
    operands, _, over = instruction.args
    return [value.reads[at] if at >= 0 else -1 for at in over] if len(operands) == len(value.reads) else []


def _end(plan: Plan, value: ReportedValue, committed: int, replaced: Collection[str], outputs: Collection[int]) -> int:
    """Until which value a worker keeps a buffer whatever its readers: inputs and results to the end, states that the
    step replaces to the commit."""
    if value.instruction >= 0:
        return sys.maxsize if plan.instructions[value.instruction].out in outputs else -1
    if value.op in ("scalar", "seed"):
        return -1
    return committed if value.op == "state" and _label(value.call) in replaced else sys.maxsize


def _kind(value: ReportedValue) -> str:
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
