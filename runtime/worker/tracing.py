"""Measuring steps: what a worker notes down, and the trace that the controller makes of it.

A worker writes what it measured into shared memory of its own, which the controller maps too: nothing is sent, and the
steps that ran are known also where a worker died, or the mesh is closed while it is traced. The memory is a ring of
8-byte words behind words of its own, two of which count all words ever written: up to where the ring is being
written, and up to where it has been. A record ends with its length, so that it is read from the newest back, as far as
the ring has room: a long run keeps its last steps, and a third word counts all of them.

    step       kind, number, start, end, plan, failed, then (instruction, start, end, held, waited) of each span
    other      kind, number, start, end

Times are CLOCK_MONOTONIC's, in nanoseconds: one clock for all processes of a host. Those of workers on other hosts are
put on the controller's clock in `Recorder.trace`, as well as messages there and back tell how the two differ; their
buffers come at the end (`measured_part`).

What a worker holds is kept up incrementally: a count of references for each storage, of handles and of slots.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch.compiler.plan import Command, Handled, MeshSpec, Plan, Span, Step, Trace, TracedPlan
from monarch.runtime.shared import wire

clock = time.monotonic_ns

WRITING, WRITTEN, STEPS, HEAD = range(4)
"""Words at the start of a worker's buffer, and how many."""

_TOTAL_BYTES = 256 << 20
_KINDS = {
    wire.PUT: "put",
    wire.LOAD: "load",
    wire.UNLOAD: "unload",
    wire.FREE: "free",
    wire.FETCH: "fetch",
    wire.LEND: "lend",
    wire.ADOPT: "adopt",
}


def buffer_words(workers: int) -> int:
    """The size of each worker's buffer: 256 MiB on all of them, 32 MiB at most and 1 MiB at least on one. Pages are
    taken when they are first written."""
    return max(1 << 20, min(32 << 20, _TOTAL_BYTES // workers)) // 8


class Held:
    """How many bytes the distinct storages take that a worker refers to, by handle or from a slot of the step that
    runs."""

    def __init__(self) -> None:
        self.bytes = 0
        self._storages: dict[int, list[int]] = {}  # address: references, bytes
        self._slots: dict[int, Any] = {}

    def take(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            entry = self._storages.get(address := storage.data_ptr())
            if entry is None:
                size = storage.nbytes()
                self._storages[address] = [1, size]
                self.bytes += size
            else:
                entry[0] += 1
        elif isinstance(value, (list, tuple)):
            for each in value:
                self.take(each)

    def drop(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            entry = self._storages[address := value.untyped_storage().data_ptr()]
            entry[0] -= 1
            if not entry[0]:
                self.bytes -= entry[1]
                del self._storages[address]
        elif isinstance(value, (list, tuple)):
            for each in value:
                self.drop(each)

    def fill(self, slot: int, value: Any) -> None:
        before = self._slots.get(slot)
        self.take(value)
        if before is not None:
            self.drop(before)
        self._slots[slot] = value

    def clear(self, slots: Sequence[int]) -> None:
        """Behind the frame's own line: gives up the last reference to what these slots held."""
        for slot in slots:
            value = self._slots.pop(slot, None)
            if value is not None:
                self.drop(value)

    def clear_all(self) -> None:
        while self._slots:
            self.drop(self._slots.popitem()[1])


class CountedValues(dict[int, Any]):
    """A worker's values by handle, of which `held` keeps count."""

    def __init__(self, values: dict[int, Any], held: Held) -> None:
        super().__init__(values)
        self._held = held
        for value in values.values():
            held.take(value)

    def __setitem__(self, handle: int, value: Any) -> None:
        self._held.take(value)
        if handle in self:
            self._held.drop(self[handle])
        super().__setitem__(handle, value)

    def pop(self, handle: int, default: Any = None) -> Any:
        value = super().pop(handle, default)
        self._held.drop(value)
        return value


class Tracer:
    """A worker's side: what a measured frame calls, and the records in `memory`, words that are zero at first.

    `clock` and `waited` give nanoseconds: the time, and how long this worker has waited for peers in all. `fd` is the
    file that `memory` maps, where there is one."""

    def __init__(
        self, memory: memoryview, clock: Callable[[], int], waited: Callable[[], int] = lambda: 0, fd: int = -1
    ) -> None:
        self.clock = clock
        self.fd = fd
        self.held = Held()
        self.memory = memory
        self._waited = waited
        self._room = len(memory) - HEAD
        self._spans: list[int] = []
        self._waits = 0

    # -- what a measured frame calls -------------------------------------------------------------------------------

    def enter(self, slots: Sequence[int], values: Sequence[Any]) -> None:
        self._spans = []
        self._waits = self._waited()
        for slot, value in zip(slots, values, strict=True):
            self.held.fill(slot, value)

    def ran(self, instruction: int, start: int, end: int, slot: int, value: Any) -> None:
        self.held.fill(slot, value)
        self._spans += (instruction, start, end, self.held.bytes, 0)

    def met(self, instruction: int, start: int, end: int, slot: int = -1, value: Any = None) -> None:
        """A collective, or (without a slot) a commit."""
        if slot >= 0:
            self.held.fill(slot, value)
        before, self._waits = self._waits, self._waited()
        self._spans += (instruction, start, end, self.held.bytes, self._waits - before)

    def freed(self, slots: Sequence[int]) -> None:
        self.held.clear(slots)

    # -- records ---------------------------------------------------------------------------------------------------

    def step(self, number: int, plan: int, start: int, failed: bool) -> None:
        """A run is over."""
        self.held.clear_all()
        spans, self._spans = self._spans, []
        self.memory[STEPS] += 1
        self._write([wire.RUN, number, start, self.clock(), plan, int(failed), *spans])

    def other(self, kind: int, number: int, start: int) -> None:
        self._write([kind, number, start, self.clock()])

    def _write(self, words: list[int]) -> None:
        words.append(len(words) + 1)
        row, memory, room = array("q", words), self.memory, self._room
        start = memory[WRITTEN]
        end = start + len(row)
        memory[WRITING] = end
        if len(row) <= room:  # of a larger one nothing is kept: whoever reads finds no length that fits
            at = start % room
            first = min(len(row), room - at)
            memory[HEAD + at : HEAD + at + first] = memoryview(row)[:first]
            memory[HEAD : HEAD + len(row) - first] = memoryview(row)[first:]
        else:
            memory[HEAD + (end - 1) % room] = len(row)
        memory[WRITTEN] = end


def records(buffer: torch.Tensor) -> list[list[int]]:
    """The records that a buffer still holds, oldest first. It may be written meanwhile: a copy is looked at."""
    written = int(buffer[WRITTEN])
    room = len(buffer) - HEAD
    words = buffer[HEAD : HEAD + min(written, room)].clone()
    oldest = max(0, int(buffer[WRITING]) - room)  # what was written meanwhile has overwritten the oldest
    found: list[list[int]] = []
    end = written
    while end > oldest:
        length = int(words[(end - 1) % room])
        if not 1 < length <= end - oldest:
            break
        start = (end - length) % room
        row = words[start : start + length].tolist()
        row += words[: length - len(row)].tolist()
        found.append(row[:-1])
        end -= length
    return found[::-1]


def measured_part(memory: memoryview) -> memoryview:
    """Of a buffer's bytes those that have been written."""
    words = memory.cast("q")
    return memory[: 8 * (HEAD + min(words[WRITTEN], len(words) - HEAD))]


class Recorder:
    """The controller's side: what it did, the plans that ran, and the workers' buffers by rank."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh
        self.start = clock()
        self.buffers: dict[int, torch.Tensor] = {}
        self.offsets: dict[int, int] = {}  # nanoseconds that the controller's clock is ahead of a worker's, by rank
        self._plans: dict[int, Plan] = {}
        self._commands: list[Command] = []

    def did(self, kind: str, label: str, start: int, number: int) -> None:
        self._commands.append(Command(kind, label, start - self.start, clock() - self.start, number))

    def ran(self, number: int, plan: Plan) -> None:
        """A run of the plan that the workers know by this number is recorded by them."""
        known = self._plans.get(number)
        if known is None or (known.report is None and plan.report is not None):
            self._plans[number] = plan

    def trace(self) -> Trace:
        """What has been measured so far. Workers may be running, or gone."""
        at = {number: index for index, number in enumerate(self._plans)}
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
                    handled.append(Handled(_KINDS[kind], number, rank, start, end))
                elif rest[0] in at:
                    steps.append(
                        Step(at[rest[0]], number, rank, start, end, self._spans(rest[2:], origin), bool(rest[1]))
                    )
        return Trace(
            self.mesh,
            tuple(TracedPlan(plan.name, plan.hash, plan) for plan in self._plans.values()),
            tuple(sorted(steps, key=lambda step: (step.start, step.worker))),
            tuple(sorted(self._commands, key=lambda command: (command.start, -command.end))),
            tuple(sorted(handled, key=lambda each: (each.start, each.worker))),
            dropped,
        )

    def _spans(self, words: list[int], origin: int) -> tuple[Span, ...]:
        return tuple(
            Span(instruction, start - origin, end - origin, held, waited)
            for instruction, start, end, held, waited in zip(*[iter(words)] * 5, strict=True)
        )
