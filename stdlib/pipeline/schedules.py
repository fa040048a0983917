"""Schedules of pipelines, as data: the actions of each group of workers, and their times, on an abstract machine.

Each group has a fixed order of forward and backward passes; times follow from what each waits for. With stages that
take equally long and transfers that take no time, the part of the time in which a group has nothing to do (the bubble)
is, for p groups and m microbatches,

    gpipe, 1f1b     (p-1) / (m + p-1)        Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019
    interleaved     (p-1) / (v m + p-1)      v stages on each group; Narayanan et al., "Megatron-LM", 2021
    zero-bubble     (p-1) / (3 m + p-1)      m ≥ p; ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023

A group i holds the activations of m microbatches with gpipe, of min(m, p - i) with 1f1b, and of at most p with
zero-bubble.
"""

from __future__ import annotations

from monarch.compiler.tape import Timetable
from monarch.compiler.tape.timetable import BACKWARD, FORWARD, WEIGHTS, Entry

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

Action = tuple[str, int, int]
"""An action, its stage, and its microbatch."""


def order(schedule: str, groups: int, microbatches: int, virtual: int = 1) -> Timetable:
    """The timetable of a schedule for `groups` groups of workers with `virtual` stages each. Raises ValueError for an
    unknown schedule, counts that are no whole numbers from one on, several stages a group in a schedule other than
    "interleaved", and for that one where the groups do not divide the microbatches."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: it must be one of {', '.join(map(repr, SCHEDULES))}")
    if any(type(each) is not int for each in (groups, microbatches, virtual)):
        raise ValueError(f"{groups!r} groups, {microbatches!r} microbatches, {virtual!r} stages a group: whole numbers")
    if min(groups, microbatches, virtual) < 1:
        raise ValueError(f"{groups} groups, {microbatches} microbatches, {virtual} stages a group: each is at least 1")
    if virtual > 1 and schedule != "interleaved":
        raise ValueError(f"{virtual} stages a group: only the schedule 'interleaved' takes several, not {schedule!r}")
    if virtual > 1 and microbatches % groups:
        raise ValueError(
            f"{microbatches} microbatches over {groups} groups: the schedule 'interleaved' takes a multiple of {groups}"
        )
    orders = [_order(schedule, group, groups, microbatches, virtual) for group in range(groups)]
    entries = _times(orders, groups, groups * virtual, schedule == "zero-bubble")
    return Timetable(schedule, groups, groups * virtual, microbatches, tuple(sorted(entries)))


def _order(schedule: str, group: int, groups: int, microbatches: int, virtual: int) -> list[Action]:
    """The forward and backward passes of a group: some forward passes, then one of each in turn."""
    pairs = [(stage, k) for stage in range(group, groups * virtual, groups) for k in range(microbatches)]
    forward = sorted(pairs, key=lambda pair: (pair[1] // groups, pair[0], pair[1]))
    backward = sorted(pairs, key=lambda pair: (pair[1] // groups, -pair[0], pair[1]))
    ahead = groups - group - 1
    if schedule == "gpipe":
        ahead = len(pairs)
    elif virtual > 1:
        ahead = 2 * ahead + (virtual - 1) * groups
    found: list[Action] = [(FORWARD, *pair) for pair in forward[:ahead]]
    for at, pair in enumerate(backward):
        found += [(FORWARD, *each) for each in forward[ahead + at : ahead + at + 1]]
        found.append((BACKWARD, *pair))
    return found


def _times(orders: list[list[Action]], groups: int, stages: int, split: bool) -> list[Entry]:
    """The actions of each group and their times: each the next in its order, as soon as its inputs are done. Where the
    gradients of weights are apart (`split`), a group computes them while it waits, and before it holds more than
    `groups` microbatches."""
    cost = {FORWARD: 1, BACKWARD: 1 if split else 2, WEIGHTS: 1}
    ends: dict[Action, int] = {}
    free, at, started, weighed = ([0] * groups for _ in range(4))
    left: list[list[Action]] = [[] for _ in range(groups)]
    entries: list[Entry] = []
    now = 0

    def needs(action: Action) -> list[Action]:
        name, stage, k = action
        if name == WEIGHTS:
            return [(BACKWARD, stage, k)]
        if name == FORWARD:
            return [(FORWARD, stage - 1, k)] if stage else []
        return [(FORWARD, stage, k), *([(BACKWARD, stage + 1, k)] if stage + 1 < stages else [])]

    def is_ready(action: Action) -> bool:
        return all(ends.get(each, now + 1) <= now for each in needs(action))

    while True:
        for group in range(groups):
            if free[group] > now:
                continue
            action = next(iter(orders[group][at[group] :]), None)
            full = split and action is not None and action[0] == FORWARD and started[group] - weighed[group] >= groups
            if action is not None and not full and is_ready(action):
                at[group] += 1
                started[group] += action[0] == FORWARD
                if split and action[0] == BACKWARD:
                    left[group].append((WEIGHTS, *action[1:]))
            elif left[group] and is_ready(left[group][0]):
                action = left[group].pop(0)
                weighed[group] += 1
            else:
                continue
            free[group] = ends[action] = now + cost[action[0]]
            entries.append(Entry(now, action[1], action[2], action[0], free[group]))
        later = [each for each in free if each > now]
        if not later:
            return entries
        now = min(later)
