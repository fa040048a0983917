"""Snapshots: a copy of all values at one step, of which each worker keeps its own blocks and, of values that no layout
replicates, those of another worker. With what was asked of the workers since, which is kept here, a mesh that has lost
values goes on without having lost a step. Pure: the executor gives the commands.

    take     every worker notes its values; what a later step would write over, it copies first
    send     once that step is done on all workers: each sends its blocks of what is not replicated to another worker,
             in pieces of some MiB, between steps
    whole    once all has arrived: only now is the former snapshot of no use, and dropped when the next is taken

So a death at any moment leaves one that is whole.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from monarch.compiler.plan import MeshSpec, TensorType
from monarch.compiler.survival import worker_bytes
from monarch.runtime.controller.healing import Located, Pairs, blocks_by_rank, copies, find_sources, located
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import RemoteTensor, Replay, Step
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place

LOG_BYTES, LOG_STEPS = 256 << 20, 4096
"""So many bytes of commands since a snapshot are kept before the next one is taken early, and four times as much at
most."""

logger = logging.getLogger("monarch")


@dataclass(frozen=True)
class _Whole:
    """A snapshot that has arrived wherever it is kept."""

    number: int
    values: dict[int, Located]
    since: int
    """The command by which it was taken."""


@dataclass
class _Taken:
    """A snapshot that is not whole yet."""

    number: int
    take: Step
    candidates: list[tuple[int, Located, Step, Step | None]]
    """Values that may be in it: handle, type and place, the step that makes it, and the one that it was donated to by
    then."""
    values: dict[int, Located] | None = None
    """Those that are in it, once that is known."""
    pieces: deque[bytes] = field(default_factory=deque)
    """The pieces that are still to be sent."""
    at_once: int = 1
    sent: list[Step] = field(default_factory=list)


class Snapshots:
    """Those of one mesh. Not thread-safe. A call may be interrupted anywhere, and a signal's handler may come in
    between with calls of its own: then the snapshot under way is given up. The whole one is replaced on one line."""

    def __init__(self, state: ControllerState, hosts: int, every: int, copies: int) -> None:
        self.every, self.copies = every, copies
        self._state, self._mesh = state, state.mesh
        mesh = state.mesh
        each = self._each = mesh.workers // hosts if hosts > 1 else 1
        step = each
        self.keepers = [[(rank + step * at) % mesh.workers for at in range(1, copies + 1)] for rank in _ranks(mesh)]
        """By rank, the workers that keep copies of its blocks: on other hosts, where there are several."""
        self.due = True
        self._whole: _Whole | None = None
        self._holders: set[int] = set()
        """The workers that still have their part of it."""
        self._commits = 0  # since the last was taken
        self._next = 0
        self._taken: _Taken | None = None
        self._size, self._measured = 0, 0  # of the log, and of how many of its steps
        state.log = deque()

    @property
    def number(self) -> int:
        """The snapshot that is whole; -1 where none is."""
        return -1 if self._whole is None else self._whole.number

    @property
    def under_way(self) -> bool:
        return self._taken is not None

    def ran(self, step: Step) -> None:
        """The workers have got a step."""
        self._commits += step.commits
        self.due = self.due or self._commits >= self.every or self._fills(1)
        if self._whole is not None and self._fills(4):
            logger.warning("%s: the last snapshot is dropped, because no later one could be made", self._mesh)
            self._whole = None
        if self._whole is None and self._taken is None:
            self._log.clear()

    def _fills(self, times: int) -> bool:
        log = self._log
        if len(log) < self._measured:
            self._size = self._measured = 0
        with suppress(IndexError):  # a handler has shortened it
            for at in range(self._measured, len(log)):
                again = log[at][1]
                self._size += sum(map(len, again.parts)) + (len(again.record) if isinstance(again.record, bytes) else 0)
        self._measured = len(log)
        return self._size > times * LOG_BYTES or len(log) > times * LOG_STEPS

    @property
    def _log(self) -> deque[tuple[Step, Replay]]:
        assert self._state.log is not None
        return self._state.log

    def take(self, live: Sequence[RemoteTensor]) -> tuple[Step, bytes]:
        """Take a snapshot: the command to give now, behind all that make the `live` handles."""
        candidates = [
            (each.id, located(each), each.step, each.taken_by)
            for each in live
            if each.step.noted and each.step.error is None and (each.taken_by is None or each.taken_by.error is None)
        ]
        taken = self._taken = _Taken(self._next, Step("take a snapshot"), candidates)
        self._next += 1
        self._commits, self.due = 0, False
        return taken.take, wire.numbers(wire.TAKE, taken.number, self.number)

    def send(self) -> Iterator[tuple[Step, bytes]]:
        """The commands to give now for the snapshot under way."""
        taken = self._taken
        if taken is None or not self._is_done(taken.take) or not self._is_given(taken.sent):
            return
        if taken.values is None:
            values = {
                id: value
                for id, value, made, gone in taken.candidates
                if made.error is None and (gone is None or (gone.error is not None and not gone.lost))
            }
            pieces = deque[bytes]()
            for place, alone in _alone_by_place(values, self._each).items():
                for at in range(self.copies):
                    pairs = tuple((rank, self.keepers[rank][at]) for rank in place.ranks)
                    pieces.extend(copies(alone, place.mesh, pairs, wire.SEND, [taken.number]))
            at_once = -(-len(pieces) // max(1, self.every // 2))
            taken.values, taken.pieces, taken.at_once = values, pieces, at_once
        for _ in range(taken.at_once):
            if taken.pieces and self._taken is taken:
                step, piece = Step("send a snapshot"), taken.pieces[0]
                taken.sent.append(step)
                taken.pieces.popleft()
                yield step, piece
        if self._taken is taken and not taken.pieces and all(map(self._is_done, taken.sent)):
            self._finish(taken)

    def _is_given(self, steps: Sequence[Step]) -> bool:
        """Whether the workers have got all of them. Where a call was interrupted, the snapshot is given up."""
        if not all(step.noted for step in steps):
            self._taken, self.due = None, True
        return self._taken is not None

    def _is_done(self, step: Step) -> bool:
        return self._is_given([step]) and step.sequence < self._state.finished_commands

    def _finish(self, taken: _Taken) -> None:
        if failed := next((step.error for step in (taken.take, *taken.sent) if step.error is not None), None):
            logger.warning("%s: a snapshot could not be made: %s", self._mesh, failed.message)
            self._taken = None
            return
        assert taken.values is not None
        everyone, log = set(_ranks(self._mesh)), self._log
        whole = _Whole(taken.number, taken.values, taken.take.sequence)
        self._whole, self._holders, self._taken = whole, everyone, None
        while log and (first := log[0])[0].sequence < whole.since:
            _ = log.popleft() if log and log[0] is first else None
        logger.debug("%s: snapshot %d is complete, with %d values", self._mesh, whole.number, len(whole.values))

    # -- after a death -----------------------------------------------------------------------------------------------

    def left(self, alive: Set[int]) -> None:
        """Only these workers are left of the session: the next snapshot is due."""
        self._holders &= alive
        self._taken, self.due = None, True

    def way_back(self, needed: Set[int]) -> list[bytes] | None:
        """The commands by which all workers have the values of the snapshot that is whole. None where some of these are
        lost too, or what is `needed` would not be there behind the replay."""
        whole = self._whole
        if whole is None or any(step.lost for step, _ in self._log) or not needed <= self.made():
            return None
        lacking = [rank for rank in _ranks(self._mesh) if rank not in self._holders]
        keepers = {rank: next((at for at in self.keepers[rank] if at in self._holders), None) for rank in lacking}
        by_pairs: dict[tuple[Pairs, MeshSpec], dict[int, TensorType]] = {}
        alone: dict[int, Located] = {}
        for id, value in whole.values.items():
            pairs = find_sources(*value, self._holders)
            kept = all(keepers.get(rank, rank) is not None for rank in value.place.ranks)
            if pairs:
                by_pairs.setdefault((pairs, value.place.mesh), {})[id] = value.type
            elif pairs is None and _is_alone(value, self._each) and kept:
                alone[id] = value
            elif pairs is None:
                return None
        records = [wire.numbers(wire.BACK, whole.number)]
        for (pairs, mesh), values in by_pairs.items():
            records += copies(values, mesh, pairs)
        for place, types in _alone_by_place(alone, self._each).items():
            for rank, keeper in keepers.items():
                if keeper is not None and rank in place.members:
                    records += copies(types, place.mesh, ((keeper, rank),), wire.GIVE, [whole.number])
        return records

    def _since(self) -> list[tuple[Step, Replay]]:
        """What was given since, but for what failed, in order; once, though a former healing has given it again, or was
        about to, as a step without a number shows."""
        assert self._whole is not None
        before = range(self._whole.since)
        found = {step: again for step, again in self._log if step.sequence not in before and step.error is None}
        return list(found.items())

    def brings_back(self, id: int) -> bool:
        """Whether healing makes this value again."""
        return self._whole is not None and id in self.made()

    def made(self) -> set[int]:
        """The handles that have a value behind the way back and the replay."""
        assert self._whole is not None
        return set(self._whole.values).union(*(again.makes for _, again in self._since()))

    def replay(self) -> list[Step]:
        """The steps that the workers get again behind the way back, in order."""
        since = self._since()
        for step, again in since:
            step.again = again
        return [step for step, _ in since]


def snapshot_bytes(live: Sequence[RemoteTensor], copies: int, each: int) -> int:
    """How much a worker holds at most for snapshots of such values: the last that is whole, and one under way. `each`
    is as for `_is_alone`."""
    values = map(located, live)
    return 2 * sum(
        worker_bytes(value.type, value.place.mesh) * (1 + copies * _is_alone(value, each)) for value in values
    )


def _is_alone(value: Located, each: int) -> bool:
    """Whether some block of such a value is with one worker alone, or of several hosts, with `each` workers, on one."""
    homes: dict[tuple[int, ...], set[int]] = {}
    for rank, block in blocks_by_rank(*value).items():
        homes.setdefault(block, set()).add(rank // each)
    return any(len(found) == 1 for found in homes.values())


def _alone_by_place(values: Mapping[int, Located], each: int) -> dict[Place, dict[int, TensorType]]:
    """Those of the values that a single loss would take a block of, by where they are."""
    found: dict[Place, dict[int, TensorType]] = {}
    for id, value in values.items():
        if _is_alone(value, each):
            found.setdefault(value.place, {})[id] = value.type
    return found


def _ranks(mesh: MeshSpec) -> range:
    return range(mesh.workers)
