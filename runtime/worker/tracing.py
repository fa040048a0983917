"""Measuring steps: a worker's notes (`shared.measured`), and how many bytes it holds.

Its bytes are counted as they change: a count of references for each storage, of handles and of slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch.runtime.shared import wire
from monarch.runtime.shared.measured import HEAD, STEPS, WRITING, WRITTEN


class HeldBytes:
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

    def __init__(self, values: dict[int, Any], held: HeldBytes) -> None:
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
    """A worker's side: the functions that a measured frame calls, and the records in `memory`, words that are zero at
    first.

    `clock` and `waited` give nanoseconds: the time, and how long this worker has waited for peers in all. `fd` is the
    file that `memory` maps, where there is one."""

    def __init__(
        self, memory: memoryview, clock: Callable[[], int], waited: Callable[[], int] = lambda: 0, fd: int = -1
    ) -> None:
        self.clock = clock
        self.fd = fd
        self.held = HeldBytes()
        self.memory = memory
        self._waited = waited
        self._room = len(memory) - HEAD
        self._spans: list[int] = []
        self._waits = 0

    # -- called by a measured frame
    # ---------------------------------------------------------------------------------------

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
        if len(row) <= room:  # of a larger one nothing is kept: a reader finds no length that fits
            at = start % room
            first = min(len(row), room - at)
            memory[HEAD + at : HEAD + at + first] = memoryview(row)[:first]
            memory[HEAD : HEAD + len(row) - first] = memoryview(row)[first:]
        else:
            memory[HEAD + (end - 1) % room] = len(row)
        memory[WRITTEN] = end
