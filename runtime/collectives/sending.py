"""Sends of a worker to other parts of a plan, beside the steps that follow.

A part that only sends (`Plan.senders`) goes on when its part of the step is done, though others are busy with earlier
steps. A thread puts its values into slots of the worker's window that nothing else uses, piece by piece as the readers
take them, while the step goes on, and at last, when it is done, says that it has sent all. It sends the values of the
plan's inputs without a copy: a step that would write over one that is not sent yet takes a copy of it (see
`WorkerState._run`). All else is copied at once.

One step's values to one set of readers are under way at a time: the next such step waits until they have been taken.
Readers that fail a step, or are past it, take nothing of it any more.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from monarch.runtime.shared import signals
from monarch.runtime.shared.signals import STEP_BITS, Aborted
from monarch.runtime.shared.window import AREAS, BACK_SLOTS, SLOTS, Window
from monarch.runtime.transport.errors import LinkLost

if TYPE_CHECKING:  # see `meeting`
    from monarch.runtime.collectives.mirror import Mirror

FIRST_SLOT = AREAS + SLOTS
"""The first area of a worker's window for the values that it sends beside its steps."""


class Sent(NamedTuple):
    """Pieces in consecutive slots: the numbers in the step of the first and the last, their readers, and the parts of a
    value in them, each with its offset there."""

    first: int
    last: int
    readers: tuple[int, ...]
    parts: Callable[[torch.Tensor], Iterable[tuple[int, torch.Tensor]]]


def put(
    window: Window, mirror: Mirror | None, readers: Sequence[int], base: int, parts: Iterable[tuple[int, torch.Tensor]]
) -> tuple[int, ...]:
    """Write a piece at an offset of the window, here and on the other hosts on which any of its readers are, before
    their next word from this worker: gives those hosts. A piece that only other hosts read goes there from the value's
    own memory."""
    hosts = () if mirror is None else mirror.hosts_of(readers)
    if mirror is not None and hosts and mirror.takes_values(readers):
        for offset, part in parts:
            mirror.write_value(hosts, base + offset, part)
        return hosts
    end = 0
    for offset, part in parts:
        window.view(base + offset, part.shape, part.dtype).copy_(part)
        end = offset + part.nbytes
    if mirror is not None:
        mirror.write(hosts, base, end)
    return hosts


@dataclass
class _Job:
    """The sends of a step. `readers` are all that the step is for."""

    step: int
    readers: frozenset[int]
    shared: Collection[int]
    """The storages of values that later steps copy before they change them: no other code writes to them."""
    values: deque[tuple[torch.Tensor, Sequence[Sent]]] = field(default_factory=deque)
    last: int = 0
    """The number by which it says that it has sent all, when the step has done its part."""
    failed: bool = False


class _Stopped(Exception):
    """The session is over."""


class Sending:
    """One worker's sends beside its steps. It calls `begin`, `add` and `finish` for one step after the other."""

    def __init__(self, window: Window, rank: int, mirror: Mirror | None) -> None:
        self._window, self._rank = window, rank
        self._mirror = None if mirror is None else mirror.apart()
        self._line = signals.line_of(rank)
        self._marks = window.signals()
        self._marks.yielding = 0  # the steps need the core
        self._slots: list[tuple[tuple[int, ...], int]] = [((), 0)] * BACK_SLOTS
        self._job: _Job | None = None
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._held: Counter[int] = Counter()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def begin(self, step: int, readers: frozenset[int], inputs: Sequence[object]) -> None:
        """A step begins that sends to these readers. Waits until they have taken what an earlier one has sent. Raises
        Aborted where a worker has died."""
        dead = self._window.words
        with self._changed:
            while any(job.readers == readers for job in self._jobs):
                if dead[signals.DEAD]:
                    raise Aborted(dead[signals.DEAD] - 1, died=True)
                self._changed.wait(0.05)
            self._job = _Job(step, readers, {_storage(each) for each in inputs if isinstance(each, torch.Tensor)})
            self._jobs.append(self._job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch sends", daemon=True)
            self._thread.start()

    def add(self, tensor: torch.Tensor, pieces: Sequence[Sent]) -> None:
        """Send a value, while the step goes on computing."""
        assert self._job is not None
        if pieces:
            own = tensor if _storage(tensor) in self._job.shared else tensor.clone()
            with self._changed:
                self._held[_storage(own)] += 1
                self._job.values.append((own, pieces))
                self._changed.notify_all()

    def finish(self, last: int) -> None:
        """The step has done its part: now its readers may commit the values that they have read."""
        assert self._job is not None
        with self._changed:
            self._job.last, self._job = last, None
            self._changed.notify_all()

    def fail(self) -> None:
        """The step has failed: its sends are dropped."""
        with self._changed:
            if self._job is not None:
                self._job.failed, self._job = True, None
                self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether there may be values that are not sent yet."""
        return bool(self._jobs)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a value is still to be sent."""
        with self._changed:
            return self._held[_storage(tensor)] > 0

    def stop(self) -> None:
        """The session is over: send nothing any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                for job in self._next():
                    self._send(job)
            except (_Stopped, LinkLost):
                pass  # others report a worker that cannot be reached

    def _next(self) -> Iterator[_Job]:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._stopped:
                        return
                    self._changed.wait()
                job = self._jobs[0]
            yield job
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _send(self, job: _Job) -> None:
        while (value := self._next_value(job)) is not None:
            tensor, pieces = value
            for piece in pieces:
                if job.failed:
                    break
                slots = [number % BACK_SLOTS for number in range(piece.first, piece.last + 1)]
                for readers, earlier in dict.fromkeys(self._slots[slot] for slot in slots):
                    for rank in readers:
                        self._until_taken(rank, earlier)
                event = job.step << STEP_BITS | piece.last
                base = self._window.geometry.area_of(self._rank, FIRST_SLOT + slots[0])
                hosts = put(self._window, self._mirror, piece.readers, base, piece.parts(tensor))
                self._marks.store(self._line + signals.BACK_SENT, event)
                if self._mirror is not None:
                    self._mirror.tell(hosts, event, signals.BACK_SENT)
                for slot in slots:
                    self._slots[slot] = piece.readers, event
            with self._changed:
                self._held -= Counter((_storage(tensor),))  # a step whose count comes to 0 is done
                job.values.popleft()
            del tensor, value
        if job.failed:
            return
        event = job.step << STEP_BITS | job.last
        self._marks.store(self._line + signals.BACK_SENT, event)
        if self._mirror is not None:
            self._mirror.tell(self._mirror.hosts_of(job.readers), event, signals.BACK_SENT)
        for rank in job.readers:
            self._until_taken(rank, event)

    def _next_value(self, job: _Job) -> tuple[torch.Tensor, Sequence[Sent]] | None:
        """The next piece of a step to send, as soon as its value is computed."""
        with self._changed:
            while not (job.values or job.last or job.failed):
                if self._stopped:
                    raise _Stopped
                self._changed.wait()
            if job.failed:
                self._held -= Counter(_storage(tensor) for tensor, _ in job.values)
                job.values.clear()
            return job.values[0] if job.values else None

    def _until_taken(self, rank: int, event: int) -> None:
        """Wait until a worker has read the pieces sent, or reads no more of that step."""
        words, step = self._window.words, event >> STEP_BITS

        def check(seen: int) -> None:
            if words[signals.DEAD] or self._stopped:
                raise _Stopped
            progress = words[signals.line_of(rank)]
            if progress >> STEP_BITS > step or (progress & 1 and progress >> STEP_BITS == step):
                raise _ReaderLeft

        try:
            self._marks.wait(signals.line_of(rank) + signals.BACK_TOOK, event, check)
        except _ReaderLeft:
            pass


class _ReaderLeft(Exception):
    """The worker that was waited for reads no more of the step."""


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
