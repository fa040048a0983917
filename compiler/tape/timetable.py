"""A timetable: in which order the stages of a pipeline work on the microbatches of a step.

It is plain data. Whoever traces a program says of each op to which stage and microbatch it belongs (`Task`);
`compiler/passes/timetable.py` brings the graph into the timetable's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
"""What a stage does with a microbatch. Where a timetable has "W", the gradients of weights are apart from "B"."""


class Task(NamedTuple):
    """The stage and the microbatch that an op of the traced program belongs to. `by_rows` is whether it is one of the
    model's, which has to compute each row of the batch from itself alone."""

    stage: int
    microbatch: int
    by_rows: bool = False


class Entry(NamedTuple):
    """One action of a stage on a microbatch, and when it starts and ends on the abstract machine: stages take equally
    long, transfers no time, a backward pass twice as long as a forward pass."""

    start: int
    stage: int
    microbatch: int
    action: str
    end: int

    def __str__(self) -> str:
        return f"{self.action}{self.microbatch}"


class Barrier(NamedTuple):
    """An op on the whole batch in the middle of a stage: its name."""

    stage: int
    op: str


@dataclass(frozen=True)
class Timetable:
    """What the groups of workers of a pipeline do, and when.

    `name`          the schedule's: "gpipe", "1f1b", "interleaved" or "zero-bubble"
    `groups`        groups of workers: stage s is on group s % groups
    `stages`        of the model
    `microbatches`  of a step
    `entries`       every action, by its start
    """

    name: str
    groups: int
    stages: int
    microbatches: int
    entries: tuple[Entry, ...]
    barriers: tuple[Barrier, ...] = ()
    """Where the stages wait until all microbatches have come, in the order of the forward pass."""

    @cached_property
    def is_split(self) -> bool:
        """Whether the gradients of weights are computed apart from those of inputs."""
        return any(entry.action == WEIGHTS for entry in self.entries)

    @property
    def bubble(self) -> float:
        """The part of the time in which groups have nothing to do, on the abstract machine."""
        busy = sum(entry.end - entry.start for entry in self.entries)
        ends = max(entry.end for entry in self.entries)
        return 1 - busy / (self.groups * max(ends, self._with_barriers()))

    def _with_barriers(self) -> float:
        """The time that a step takes at least for its barriers, of which each cuts its stage into equal pieces: all
        microbatches go through what is between two of them before any goes on, there and back."""
        if not self.barriers:
            return 0
        pieces = [1 + [barrier.stage for barrier in self.barriers].count(stage) for stage in range(self.stages)]
        legs: list[list[float]] = [[0.0] * self.groups]
        for stage, count in enumerate(pieces):
            for piece in range(count):
                if piece:
                    legs.append([0.0] * self.groups)
                legs[-1][stage % self.groups] += 1 / count
        return 3 * sum(sum(leg) + (self.microbatches - 1) * max(leg) for leg in legs)

    def of_group(self, group: int) -> tuple[Entry, ...]:
        """What a group does, in order."""
        return tuple(entry for entry in self.entries if entry.stage % self.groups == group)

    def held(self, group: int) -> int:
        """For how many of its (stage, microbatch) pairs a group holds activations at once, at most: from the start of
        "F" to the end of the last action on it."""
        if self.barriers:
            return self.microbatches * len(range(group, self.stages, self.groups))
        last = WEIGHTS if self.is_split else BACKWARD
        now = most = 0
        for entry in self.of_group(group):
            now += (entry.action == FORWARD) - (entry.action == last)
            most = max(most, now + (entry.action == last))
        return most

    @property
    def facts(self) -> dict[str, Any]:
        """What a report says of it; `held` and `order` are by group, and `timetable` is the drawing's lines."""
        return {
            "name": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "bubble": self.bubble,
            "held": [self.held(group) for group in range(self.groups)],
            "order": [
                [[entry.action, entry.stage, entry.microbatch] for entry in self.of_group(group)]
                for group in range(self.groups)
            ],
            "timetable": str(self).splitlines(),
        } | ({"barriers": [list(barrier) for barrier in self.barriers]} if self.barriers else {})

    @cached_property
    def places(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        """For each (action, stage, microbatch) its place in one order of everything, and the place of what it sends:
        behind all that has started before it ends, so that a receiver waits for nothing that it need not have yet."""
        moments = [(entry.start, 1, entry) for entry in self.entries] + [
            (entry.end, 0, entry) for entry in self.entries
        ]
        order = {(entry, kind): at for at, (_, kind, entry) in enumerate(sorted(moments))}
        return {
            (entry.action, entry.stage, entry.microbatch): (order[entry, 1], order[entry, 0]) for entry in self.entries
        }

    def __str__(self) -> str:
        """One line for each group, a column for each unit of time."""
        wide = len(str(self.microbatches - 1)) + 1 + (len(str(self.stages - 1)) + 1) * (self.stages > self.groups)
        lines = []
        for group in range(self.groups):
            row: dict[int, str] = {}
            for entry in self.of_group(group):
                text = str(entry) + (f"/{entry.stage}" if self.stages > self.groups else "")
                row |= {at: text if at == entry.start else "-" * wide for at in range(entry.start, entry.end)}
            cells = [row.get(at, ".").ljust(wide) for at in range(max(row) + 1)]
            lines.append(f"group {group}: {' '.join(cells)}".rstrip())
        return "\n".join(lines)
