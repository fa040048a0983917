"""The trace of the steps of a measured mesh: the controller's spans, and the workers' notes (`shared.measured`).

Times of workers on other hosts are put on the controller's clock, as exactly as messages there and back show how the
two differ; their buffers come at the end.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from monarch.compiler.execution.events import Span
from monarch.compiler.plan import Command, Handled, MeshSpec, Plan, Step, Trace, TracedPlan
from monarch.compiler.plan import Span as Instruction
from monarch.runtime.shared import wire
from monarch.runtime.shared.measured import STEPS, clock, records

KINDS = {
    wire.PUT: "put",
    wire.LOAD: "load",
    wire.UNLOAD: "unload",
    wire.FREE: "free",
    wire.FETCH: "fetch",
    wire.LEND: "lend",
    wire.ADOPT: "adopt",
    wire.COPY: "copy",
    wire.TAKE: "snapshot",
    wire.SEND: "snapshot",
    wire.BACK: "go back",
    wire.GIVE: "go back",
    wire.LEAVE: "leave",
    wire.SUM: "check replicas",
    wire.WRITE: "save",
    wire.WRITTEN: "save",
    wire.READ: "read files",
    wire.FAULT: "fault",
}
"""The name of each command that a worker measures, one of HANDLED."""


class Recorder:
    """The controller's side: its spans, the plans that ran, and the workers' buffers by rank."""

    def __init__(self, mesh: MeshSpec, executor: weakref.ref[Any]) -> None:
        self.mesh = mesh
        self._executor = executor
        self.start = clock()
        self.buffers: dict[int, torch.Tensor] = {}
        self.offsets: dict[int, int] = {}  # nanoseconds that the controller's clock is ahead of a worker's, by rank
        self._plans: dict[tuple[int, int], Plan] = {}
        """By the workers' number for the plan, and the number of the part where it has several."""
        self._parts: dict[int, dict[int, int]] = {}
        """For plans of several parts, by number, the number of each worker's part."""
        self._commands: list[Command] = []

    def hear(self, span: Span) -> None:
        if span.executor is self._executor():
            start, end = span.start - self.start, span.end - self.start
            self._commands.append(Command(span.kind, span.label, start, end, span.number))

    def ran(self, number: int, plan: Plan) -> None:
        """A run of the plan that the workers know by this number is recorded by them."""
        if plan.parts and number not in self._parts:
            self._parts[number] = {rank: at for at, part in enumerate(plan.parts) for rank in part.place.ndslice}
        for at, each in enumerate([part.plan for part in plan.parts] or [plan]):
            known = self._plans.get((number, at))
            if known is None or (known.report is None and each.report is not None):
                self._plans[number, at] = each

    def trace(self) -> Trace:
        """The measurements so far. Workers may be running, or gone."""
        at = {key: index for index, key in enumerate(self._plans)}
        steps: list[Step] = []
        handled: list[Handled] = []
        dropped = 0
        for rank, buffer in sorted(self.buffers.items()):
            rows = records(buffer)
            dropped += max(0, int(buffer[STEPS]) - sum(row[0] == wire.RUN for row in rows))
            origin = self.start - self.offsets.get(rank, 0)
            for kind, number, start, end, *rest in rows:
                start, end = start - origin, end - origin
                if kind != wire.RUN:
                    handled.append(Handled(KINDS[kind], number, rank, start, end))
                elif (key := (rest[0], self._parts.get(rest[0], {}).get(rank, 0))) in at:
                    steps.append(Step(at[key], number, rank, start, end, self._spans(rest[2:], origin), bool(rest[1])))
        return Trace(
            self.mesh,
            tuple(TracedPlan(plan.name, plan.hash, plan) for plan in self._plans.values()),
            tuple(sorted(steps, key=lambda step: (step.start, step.worker))),
            tuple(sorted(self._commands, key=lambda command: (command.start, -command.end))),
            tuple(sorted(handled, key=lambda each: (each.start, each.worker))),
            dropped,
        )

    def _spans(self, words: list[int], origin: int) -> tuple[Instruction, ...]:
        return tuple(
            Instruction(instruction, start - origin, end - origin, held, waited)
            for instruction, start, end, held, waited in zip(*[iter(words)] * 5, strict=True)
        )
