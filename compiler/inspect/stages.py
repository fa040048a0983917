"""The stages of a pipeline: how long each is estimated to take, and what that makes of the schedule's bubble.

A schedule's own bubble is that of stages which take equally long. Here its order is played with the estimates: a group
of workers does its actions one after the other, each as soon as those that it needs are done. Transfers take no time,
and what belongs to no microbatch (the optimizer's step) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch.compiler.plan.plan import Plan

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
"""As in `compiler/tape/timetable.py`, which needs torch."""

Action = tuple[str, int, int]
"""An action of a stage on a microbatch: (action, stage, microbatch)."""


@dataclass(frozen=True)
class StageTime:
    """Estimated seconds of a worker for a stage in a step, with its collectives; `part` is the mesh that it is on."""

    stage: int
    part: str
    forward: float
    backward: float


def stage_times(plan: Plan) -> list[StageTime]:
    """Each stage's, in order. Of a plan of several meshes with reports that runs a pipeline; else none."""
    found: dict[int, tuple[str, dict[str, float]]] = {}
    for part in plan.parts:
        for value in () if part.plan.report is None else part.plan.report.values:
            if value.stage >= 0:
                _, seconds = found.setdefault(value.stage, (part.name, dict.fromkeys(("forward", "backward"), 0.0)))
                if value.phase in seconds:
                    seconds[value.phase] += value.seconds
    return [StageTime(stage, part, **seconds) for stage, (part, seconds) in sorted(found.items())]


def order_of(facts: Any) -> list[list[Action]]:
    """The actions of each group of workers, in order, as a plan's costs have them; [] where they have none that can be
    read."""
    rows = facts.get("order") if isinstance(facts, dict) else None
    found: list[list[Action]] = []
    for row in rows if isinstance(rows, list) else ():
        found.append([])
        for entry in row if isinstance(row, list) else [None]:
            match entry:
                case [str(action), int(stage), int(microbatch)] if action in (FORWARD, BACKWARD, WEIGHTS):
                    found[-1].append((action, stage, microbatch))
                case _:
                    return []
    return found


def estimated_bubble(plan: Plan) -> float | None:
    """The part of the time in which groups wait, with stages as long as estimated. None where that is not known: for a
    plan without reports or order, and where microbatches wait for one another in a stage."""
    facts = plan.costs.get("schedule")
    if not isinstance(facts, dict) or facts.get("barriers"):
        return None
    return bubble_of(order_of(facts), stage_times(plan))


def bubble_of(order: list[list[Action]], stages: Sequence[StageTime]) -> float | None:
    """The same of an order, with stages that take so long. None for one of other stages, or that waits for ever."""
    times = {each.stage: each for each in stages}
    if any(stage not in times for row in order for _, stage, _ in row):
        return None
    microbatches = len({microbatch for row in order for _, _, microbatch in row})
    is_split = any(action == WEIGHTS for row in order for action, _, _ in row)

    def seconds(action: Action) -> float:
        name, stage, _ = action
        if name == FORWARD:
            return times[stage].forward / microbatches
        return times[stage].backward / microbatches / (2 if is_split else 1)

    ends = _played(order, {action: seconds(action) for row in order for action in row})
    if ends is None or not (last := max(ends.values(), default=0.0)):
        return None
    return 1 - sum(map(seconds, ends)) / (len(order) * last)


def _played(order: list[list[Action]], seconds: Mapping[Action, float]) -> dict[Action, float] | None:
    """When each action ends; None for an order in which one waits for ever."""
    ends: dict[Action, float] = {}
    left = [list(reversed(row)) for row in order]
    free = [0.0] * len(order)
    while any(left):
        before = len(ends)
        for group, row in enumerate(left):
            while row and all(need in ends for need in _needs(row[-1], seconds)):
                action = row.pop()
                start = max([free[group], *(ends[need] for need in _needs(action, seconds))])
                free[group] = ends[action] = start + seconds[action]
        if len(ends) == before:
            return None
    return ends


def _needs(action: Action, known: Mapping[Action, float]) -> list[Action]:
    """The actions behind which one comes."""
    name, stage, microbatch = action
    beside = {
        FORWARD: [(FORWARD, stage - 1, microbatch)],
        BACKWARD: [(FORWARD, stage, microbatch), (BACKWARD, stage + 1, microbatch)],
        WEIGHTS: [(BACKWARD, stage, microbatch)],
    }
    return [each for each in beside[name] if each in known]
