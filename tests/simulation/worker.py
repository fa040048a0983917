"""A worker of the simulated cluster: what `runtime.worker.loop` and `collectives` do, one small step at a time, on
lists of numbers in place of tensors."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from monarch.runtime.shared import wire
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.peers import pack, unpack

STAGES = ("sum", "here", "hosts", "told")
"""What a step waits in: its collective, and the three of a commit over several hosts."""

Turn = Iterator[None]
"""A worker runs between two of these; None says that it has come to a place where others may run."""


class Died(Exception):
    """A worker of the mesh has died while this one waited."""


class Failed(Exception):
    """A peer failed the step while this one waited for it."""


@dataclass
class Memory:
    """A host's copy of a mesh's shared memory. `progress` is (step, stage) by rank, of workers elsewhere as far as it
    has come here, and `area` what each has
    shown in a step, by rank and step."""

    workers: int
    first: int = 0
    dead: bool = False
    released: int = 0
    ring: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin(self.first)

    def begin(self, first: int) -> None:
        """A session whose first command has this number."""
        self.dead, self.released, self.ring = False, first, {}
        self.progress = dict.fromkeys(range(self.workers), (first, 0))
        self.gave_up: dict[int, int] = dict.fromkeys(range(self.workers), -1)
        self.area: dict[tuple[int, int], Any] = {}
        self.done = dict.fromkeys(range(self.workers), first)
        self.over = dict.fromkeys(range(self.workers), first)


class Worker:
    """`mirror(worker)` has what it shows be shown on other hosts; `fails()` says whether a step is to fail here."""

    def __init__(
        self,
        rank: int,
        pid: int,
        here: range,
        memory: Memory,
        first: int,
        epoch: int,
        mirror: Callable[[Worker], None],
        fails: Callable[[], bool],
    ) -> None:
        self.rank, self.pid, self.here, self.memory = rank, pid, here, memory
        self.packets: deque[bytes] = deque()
        """From the controller, over the worker's socket."""
        self.said: deque[bytes] = deque()
        self.values: dict[int, list[float] | None] = {}
        self.epochs = deque([epoch])
        """Of the sessions that it is to begin: every worker of the mesh gives the same session the same number."""
        self.epoch = -1
        self.shown: Any = None
        self.joined = False
        """Whether it has links to other hosts."""
        self.alive = True
        self._first, self._mirror, self._fails = first, mirror, fails
        self.turns = self._live()

    # -- sessions --------------------------------------------------------------------------------------------------

    def _live(self) -> Turn:
        first = self._first
        while True:
            self.epoch = self.epochs.popleft()
            self.finished = first
            self.values = {handle: value for handle, value in self.values.items() if value is not None}
            try:
                yield from self._join()
                yield from self._work()
            except Died:
                pass
            first = yield from self._between()

    def _join(self) -> Turn:
        self.joined = True
        self._startup({"pid": self.pid, "address": None, "region": None})
        while True:
            packet = yield from self._told(self._check)
            if wire.KIND.unpack_from(packet)[0] == wire.STARTUP and "peers" in unpack(packet):
                break
        self._startup({"links": {}})

    def _work(self) -> Turn:
        memory = self.memory
        while True:
            while self.finished not in memory.ring:
                self._check()
                yield
            self._check()
            step, body = self.finished, memory.ring[self.finished]
            report = yield from self._carry_out(step, body)
            if report is not None:
                self.said.append(report.encode())
                if wire.KIND.unpack_from(body)[0] in (wire.RUN, wire.COPY):
                    yield from self._give_up(step)
            self.finished = memory.done[self.rank] = step + 1

    def _between(self) -> Any:
        self.joined = False
        self._say(wire.ENDED, self.finished)
        while True:
            packet = yield from self._told(lambda: None)
            if len(packet) % 8:
                continue
            kind, *rest = wire.unpack_numbers(packet)
            if kind == wire.SESSION:
                return rest[0]
            if kind == wire.HOW_FAR:
                self._say(wire.ENDED, self.finished)
            elif kind == wire.ASK:
                self._fetch(rest[0], rest[1])
            elif kind == wire.TABLE:
                held = [float(handle) for handle, value in self.values.items() if value is not None]
                self._value(rest[0], torch.tensor(held, dtype=torch.int64))

    def _check(self) -> None:
        if self.memory.dead:
            raise Died

    def _told(self, check: Callable[[], None]) -> Any:
        while not self.packets:
            check()
            yield
        return self.packets.popleft()

    def _say(self, kind: int, number: int) -> None:
        self.said.append(wire.UP_HEAD.pack(kind, number))

    def _startup(self, what: dict[str, Any]) -> None:
        self.said.append(pack(what))

    # -- commands --------------------------------------------------------------------------------------------------

    def _carry_out(self, step: int, body: bytes) -> Any:
        kind = wire.KIND.unpack_from(body)[0]
        if kind == wire.RUN:
            return (yield from self._run(step, body))
        if kind == wire.COPY:
            return (yield from self._copy(step, body))
        if kind == wire.PUT:
            self._put(body)
        elif kind == wire.FREE:
            for handle in wire.unpack_numbers(body)[1:]:
                self.values.pop(handle, None)
        elif kind == wire.FETCH:
            _, handle, *ranks = wire.unpack_numbers(body)
            if self.rank in ranks and not self._fetch(step, handle):
                return Report("dependent", self.rank, step, root=-1)
        else:
            assert kind == wire.LOAD, kind
        return None

    def _run(self, step: int, body: bytes) -> Any:
        """w + the sum of what all have of x; gives the result's sum, and the result in w's place."""
        _, _, base, outputs, _, freed = wire.RUN_HEAD.unpack_from(body)
        numbers = wire.unpack_numbers(body)
        for handle in numbers[len(numbers) - freed :] if freed else ():
            self.values.pop(handle, None)
        w, x = (self.values.get(handle) for handle in numbers[6:8])
        committed = False
        for at in range(outputs):
            self.values[base + at] = None
        if w is None or x is None:
            return Report("dependent", self.rank, step, root=-1)
        try:
            if self._fails():
                return Report("failed", self.rank, step, "as told")
            everyone = range(self.memory.workers)
            total = yield from self._meet(step, 1, everyone, x[0])
            try:
                yield from self._meet(step, 2, self.here)
                if self.rank == self.here[0]:
                    yield from self._meet(step, 3, range(0, self.memory.workers, len(self.here)))
                yield from self._meet(step, 4, self.here)
            except Died:
                if not (yield from self._verdict(step)):
                    raise
            committed = True
            self.values.pop(numbers[6], None)
            self.values[base + 1] = made = [each + total for each in w]
            self.values[base] = [made[0]]
        except (Died, Failed) as error:
            return Report("aborted", self.rank, step, type(error).__name__, committed=committed)
        return None

    def _copy(self, step: int, body: bytes) -> Any:
        numbers = iter(wire.unpack_numbers(body)[1:])
        pairs = [(next(numbers), next(numbers)) for _ in range(next(numbers))]
        handles = []
        for handle in numbers:
            handles.append(handle)
            next(numbers)
            for _ in range(next(numbers)):
                next(numbers)
        gives = any(source == self.rank for source, _ in pairs)
        shown = {handle: self.values[handle] for handle in handles} if gives else None
        try:
            yield from self._meet(step, 1, range(self.memory.workers), shown)
        except (Died, Failed) as error:
            return Report("aborted", self.rank, step, type(error).__name__)
        for source, target in pairs:
            if target == self.rank:
                self.values.update(self.memory.area[source, step])
        return None

    def _put(self, body: bytes) -> None:
        head = wire.PUT_HEAD
        _, handle, _, ndim, _, offset, start, end, workers = head.unpack_from(body)
        assert offset == wire.INLINE and start == 0
        at = head.size + 8 * ndim
        (block,) = struct.unpack_from("=q", body, at + 8 * self.rank)
        data = body[at + 8 * workers + block * end :][:end]
        self.values[handle] = list(struct.unpack(f"={len(data) // 8}d", data))

    def _fetch(self, number: int, handle: int) -> bool:
        value = self.values.get(handle)
        if value is not None:
            self._value(number, torch.tensor(value, dtype=torch.float64))
        return value is not None

    def _value(self, number: int, tensor: torch.Tensor) -> None:
        self.said.append(wire.value_head(wire.VALUE, number, tensor) + tensor.numpy().tobytes())

    # -- meeting others --------------------------------------------------------------------------------------------

    def _meet(self, step: int, stage: int, group: range, shown: Any = None) -> Any:
        """Say that this worker has come, and wait until the whole group has; gives the sum of what they show."""
        memory = self.memory
        memory.progress[self.rank] = (step, stage)
        if stage == 1:
            memory.area[self.rank, step] = self.shown = shown
        self._mirror(self)
        for peer in group:
            while memory.progress[peer] < (step, stage):
                if memory.dead:
                    raise Died
                if any(memory.gave_up[each] == step for each in group):
                    raise Failed
                yield
        if stage > 1 or isinstance(shown, dict) or shown is None:
            return None
        return sum(memory.area[peer, step] for peer in group)

    def _verdict(self, step: int) -> Any:
        self._say(wire.DOUBT, step)
        while True:
            packet = yield from self._told(lambda: None)
            if len(packet) % 8 == 0:
                kind, *rest = wire.unpack_numbers(packet)
                if kind == wire.VERDICT and rest[0] == step:
                    return bool(rest[1])

    def _give_up(self, step: int) -> Turn:
        memory = self.memory
        memory.gave_up[self.rank] = step
        self._mirror(self)
        memory.over[self.rank] = step + 1
        for peer in self.here:
            while memory.done[peer] <= step and memory.gave_up[peer] < step and memory.progress[peer][0] <= step:
                self._check()
                yield
        while memory.released <= step:
            self._check()
            yield
        self._check()
        memory.progress[self.rank] = (step + 1, 0)
