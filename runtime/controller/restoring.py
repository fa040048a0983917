"""The executor's part against deaths of workers: it takes snapshots, reads from the survivors which steps were done,
and heals the mesh."""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from monarch.compiler.execution.events import Failure, tell
from monarch.compiler.execution.executor import Handle, Loss
from monarch.compiler.plan import DeviceMeshError, LostError, MeshSpec, MonarchError, ReplicaError, TensorType
from monarch.compiler.survival import value_line, worker_bytes
from monarch.runtime.controller.connection import PATIENCE, Connection
from monarch.runtime.controller.healing import (
    Handles,
    Located,
    Pairs,
    Placed,
    blocks_by_rank,
    copies,
    find_sources,
    located,
    operands,
)
from monarch.runtime.controller.placing import Blocks
from monarch.runtime.controller.replicas import Names, Replicas, error_of
from monarch.runtime.controller.replies import Replies
from monarch.runtime.controller.snapshots import Snapshots, snapshot_bytes
from monarch.runtime.controller.state import ControllerState, fresh
from monarch.runtime.controller.steps import PlanRecord, RemoteTensor, Replay, Step
from monarch.runtime.shared import memory, wire
from monarch.runtime.shared.place import Place

_HEAL_SECONDS = 60.0

logger = logging.getLogger("monarch")


@dataclass
class _Survey:
    """The state of a mesh after a death."""

    values: dict[int, Located]
    """The values that workers need before they get steps again."""
    held: set[int]
    """All that some worker has."""
    lost: dict[int, Located] = field(default_factory=dict)
    pairs: dict[tuple[Pairs, MeshSpec], dict[int, TensorType]] = field(default_factory=dict)
    """The values to copy, by the worker that gives them and the one that takes them."""
    again: list[Step] = field(default_factory=list)
    """Steps that place values."""
    way_back: list[bytes] | None = None
    """The commands that bring back a snapshot, where values are lost without."""


class Restoring(ABC):
    """The part of `executor.MeshExecutor` that concerns deaths."""

    connection: Connection
    state: ControllerState
    _replies: Replies
    _mesh: MeshSpec
    place: Place
    _lock: threading.RLock
    _records: dict[tuple[str, Place | None], PlanRecord]

    def _begin(self) -> None:
        self._placed = Placed(self.state)
        self._handles = Handles()
        self.kept_snapshots: Snapshots | None = None
        self._checks: Replicas | None = None
        self._found: ReplicaError | None = None
        """The error that a check in the background has found, and that no call has raised yet."""
        self._waiting: deque[Step] = deque()
        """Steps that the workers get again, while the mesh is healed."""
        self._restoring = False  # a session has begun in which workers have not all that they are to have
        self._gave_up = False  # the last healing has given up states

    @abstractmethod
    def _give(self, step: Step) -> None:
        """Give the workers a command, or give it to them once more, and the plan and values that it needs before it."""

    @abstractmethod
    def until(self, commands: int, place: Place | None = None) -> None:
        """Wait until all workers, or those at a place, have finished so many commands."""

    # -- snapshots -------------------------------------------------------------------------------------------------

    def snapshots(self, every: int, copies: int) -> None:
        """See `Executor.snapshots`."""
        with self._lock:
            self.connection.enter()
            if self.connection.actor_processes is not None:
                raise MonarchError("a mesh in processes of actors takes no snapshots: it is not healed either")
            self.kept_snapshots = self.state.log = None
            if every == 0:
                self.connection.command(Step("forget snapshots"), wire.numbers(wire.TAKE, -1, sys.maxsize))
                self.connection.publish()
                return
            most = (self.connection.hosts if self.connection.hosts > 1 else self._mesh.workers) - 1
            if not 1 <= copies <= most:
                what = "hosts" if self.connection.hosts > 1 else "workers"
                raise MonarchError(f"cannot keep {copies} copies of a worker's state: there are {most} other {what}")
            hosts = self.connection.hosts
            each = self._mesh.workers // hosts if hosts > 1 else 1
            size = snapshot_bytes(self._handles.live(), copies, each) * self._mesh.workers
            memory.require(size, f"snapshots on {self._mesh.workers} workers", memory.available_bytes)
            self.kept_snapshots = Snapshots(self.state, self.connection.hosts, every, copies)
            self._snapshot_now()

    def _snapshot_now(self) -> None:
        """Where a snapshot is due, take one, and wait until it is whole."""
        with self._lock:
            if self.kept_snapshots is not None:
                self._go_on_with_snapshots()
                while self.kept_snapshots.under_way:
                    self.until(self.state.next_command)
                    self._go_on_with_snapshots()

    def _go_on_with_snapshots(self, step: Step | None = None) -> None:
        """Take a snapshot, or send the pieces that are due, behind a step. The next call raises a death: the step was
        given."""
        snapshots = self.kept_snapshots
        assert snapshots is not None
        if step is not None:
            snapshots.ran(step)
        with suppress(DeviceMeshError):
            if snapshots.under_way:
                self.connection.refresh()
                for send, record in snapshots.send():
                    self.connection.command(send, record)
            if snapshots.due and not snapshots.under_way:
                self.connection.command(*snapshots.take(self._handles.live()))
            self.connection.publish()

    # -- replicas ------------------------------------------------------------------------------------------------------

    def check_replicas(self, every: int | None, names: Names) -> None:
        """See `Executor.check_replicas`."""
        with self._lock:
            self.connection.enter()
            if every is not None:
                self._checks = Replicas(every, names) if every else None
                if self._checks is not None:
                    self._go_on_with_checks()
                return
            checks = Replicas(0, names)
            self._give_check(checks)
            self._compare(checks)
            self._raise_found()

    def _go_on_with_checks(self, step: Step | None = None) -> None:
        """Have the workers add up their bits where that is due, behind a step, or compare their answers."""
        checks = self._checks
        assert checks is not None
        if step is not None:
            checks.ran(step)
        with suppress(DeviceMeshError):
            if under_way := checks.steps():
                self.connection.refresh()
                if not all(each.noted for each in under_way):  # a call was interrupted
                    checks.left()
                elif under_way[-1].sequence < self.state.finished_commands:
                    self._compare(checks)
            elif checks.due:
                self._give_check(checks)

    def _give_check(self, checks: Replicas) -> None:
        for step, record in checks.ask(self._handles.live()):
            self.connection.command(step, record)
        self.connection.publish()

    def _compare(self, checks: Replicas) -> None:
        """Wait for the workers' answers, and note them. Workers that differ from most others are lost."""
        steps, connection = checks.steps(), self.connection
        try:
            for step in steps:
                connection.gather(step, set(range(self._mesh.workers)))
                self.state.check(step)
            found = checks.compare({step.sequence: self._replies.of(step.sequence) for step in steps})
        finally:
            for step in steps:
                step.expects = False
                self._replies.forget(step.sequence)
        if not found:
            return
        error = error_of(found, self._mesh, connection.host_of)
        if error.decided and connection.actor_processes is None:
            self.state.end(error)
            for rank in error.workers:
                connection.lose(rank, "held bits that differ from its replicas")
        else:
            self._found = error
            tell(Failure(self._mesh, error))

    def _raise_found(self) -> None:
        """Raise the error that a check has found, once."""
        self.connection.ready()
        if self._found is not None:
            error, self._found = self._found, None
            raise error

    # -- after a death -----------------------------------------------------------------------------------------------

    def _from_survivors(self, remote: RemoteTensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        """The blocks of a value, from survivors that have the same. Raises LostError where no worker has one."""
        with self._lock:
            if not self.connection.await_survivors(PATIENCE):
                late = ", ".join(map(str, self.state.expected))
                raise MonarchError(
                    f"a value of {self._mesh} cannot be read: it has lost a worker, and {late} do not answer",
                    hint="they compute, or have been stopped: read it again, or end them.",
                )
            blocks, alive = blocks_by_rank(*located(remote)), self.state.survivors
            alive = [rank for rank in alive if rank in blocks]
            source = {rank: next((at for at in alive if blocks[at] == blocks[rank]), -1) for rank in ranks}
            copies = self._copies(remote, [rank for rank, at in source.items() if at < 0])
            source = {rank: at for rank, at in source.items() if rank not in copies}
            if -1 in source.values():
                if remote.step.sequence > self.state.committed.get(remote.step.place, -1):  # no state depends on it
                    self.state.tell_of(remote.step)
                    assert self.state.dead is not None
                    raise fresh(self.state.dead)
                message, hint = self._lost_text([("the value", located(remote))])
                if self.kept_snapshots is not None and self.kept_snapshots.brings_back(remote.id):
                    hint = "monarch.heal_mesh(mesh) restores it from a snapshot: read it again then."
                raise LostError(message, hint=hint)
            asked = dict.fromkeys(set(source.values()), (wire.ASK, remote.id))
            found = self.connection.ask_survivors(asked) if asked else {}
            return [copies[rank] if rank in copies else found[source[rank]] for rank in ranks]

    def restore(self, states: Sequence[tuple[str, Handle]], give_up: bool) -> bool:
        """`Executor.heal`; whether there was anything to be done."""
        with self._lock:
            connection, state = self.connection, self.state
            self._gave_up = False
            connection.settle()
            if self._is_whole():
                return False
            while not self._is_whole():
                try:
                    self._heal(states, give_up)
                    connection.healing = False
                    self._snapshot_now()
                except DeviceMeshError:
                    if state.dead is None:  # it is no other worker that has died
                        raise
                finally:
                    connection.healing = False
            return True

    def _is_whole(self) -> bool:
        """Whether all workers are there, and no step remains to be given to them again."""
        connection = self.connection
        if connection.closing:
            raise MonarchError(f"the mesh {self._mesh} is closed")
        connection.look()
        return self.state.dead is None and not self._restoring

    def loss(self, states: Sequence[tuple[str, Handle]]) -> Loss | None:
        """See `Resizable.loss`."""
        with self._lock:
            self.connection.settle()
            if self._is_whole():
                return None
            found = self._survey()
            lost = [] if found.way_back is not None else self._lost_states(found.lost, states)
            lines = [value_line(name, value.type, value.place.mesh) for name, value in lost]
            gone = dict(sorted(self.state.gone.items()))
            return Loss(gone, tuple(lines), {rank: self.connection.host_of(rank) for rank in gone})

    def _survey(self) -> _Survey:
        """Find out which workers are left, and with which values; give up the steps that must not be applied."""
        connection, state, mesh = self.connection, self.state, self._mesh
        state.give_up(f"healing {mesh} was interrupted")  # where nothing else has happened: a session anew
        if not connection.await_survivors(_HEAL_SECONDS, anew=True):
            late, stopped = set(state.expected), set(connection.stopped()) & set(state.expected)
            what = ", ".join(f"{rank} (stopped by a signal)" if rank in stopped else str(rank) for rank in sorted(late))
            raise MonarchError(
                f"the mesh {mesh} cannot be healed: its workers {what} do not answer",
                hint="resume those that have been stopped (kill -CONT), or end them (kill -KILL); others compute,\n"
                "or are stuck. Call heal_mesh again then.",
            )
        if done := [told for place, told in state.told.items() if told <= state.committed.get(place, -1)]:
            raise LostError(
                f"the mesh {mesh} cannot be healed: step {done[0]} was reported as failed, and was done after all",
                hint="make a new mesh, and start again from the last checkpoint.",
            )
        tables = self._tables()
        self._waiting.extendleft(reversed(state.drop()))
        self._fail_dependent()
        found = self._found_by(tables)
        if found.way_back is None and (missed := [step for step in self._waiting if self._sends_of(step, found.lost)]):
            for step in missed:
                self._waiting.remove(step)
                state.miss(step)
            self._fail_dependent()
            found = self._found_by(tables)
        return found

    def _tables(self) -> dict[int, set[int]]:
        """Which values the survivors have, by rank. Those of them that end meanwhile are none."""
        while alive := self.state.survivors:
            try:
                answers = self.connection.ask_survivors(dict.fromkeys(alive, (wire.TABLE,)))
            except DeviceMeshError:
                if self.state.survivors == alive:  # it is no other worker that has died
                    raise
                continue
            return {rank: set(answer.tolist()) for rank, answer in answers.items()}
        return {}

    def _sends_of(self, step: Step, lost: Mapping[int, Located]) -> bool:
        """Whether values are lost that a step sends whose senders go on meanwhile."""
        return bool(step.receivers) and any(
            id in lost and not set(value.place.ranks) & set(step.receivers)
            for id, value in operands(step, self.place).items()
        )

    def _found_by(self, tables: Mapping[int, set[int]]) -> _Survey:
        """The blocks that are left of the values that these workers have."""
        alive = list(tables)
        found = _Survey(self._needed(), set().union(*tables.values()))
        placed, live = self._placed.steps(), {handle.id: handle for handle in self._handles.live()}
        for id, value in found.values.items():
            holders = {rank for rank in alive if id in tables[rank]}
            pairs = find_sources(*value, holders)
            if pairs is None and id in placed:
                found.again += placed[id]
            elif pairs is None and (again := self._from_copies(live.get(id), holders)) is not None:
                found.again.append(again)
            elif pairs is None:
                found.lost[id] = value
            elif pairs:
                found.pairs.setdefault((pairs, value.place.mesh), {})[id] = value.type
        if self.kept_snapshots is not None:
            self.kept_snapshots.left(set(alive))
            found.way_back = self.kept_snapshots.way_back(found.values.keys()) if found.lost else None
        return found

    def _copies(self, remote: RemoteTensor, ranks: Sequence[int]) -> dict[int, torch.Tensor]:
        """The blocks of a small result on these workers, from copies in shared memory; by rank."""
        if remote.copied is None or not self.state.places.has(remote.copied[0]):
            return {}
        (at, small), place, results = remote.copied, remote.owner.place, self.connection.results
        blocks = blocks_by_rank(*located(remote))
        holders = {blocks[rank]: rank for number in small.workers if (rank := place.ranks[number]) in results}
        found = {rank: results[holders[blocks[rank]]].read(at, small) for rank in ranks if blocks[rank] in holders}
        return {rank: value for rank, value in found.items() if value is not None}

    def _from_copies(self, remote: RemoteTensor | None, holders: Set[int]) -> Step | None:
        """The commands that give a small result to the workers that are not among its `holders`, where all copies that
        this takes are still in shared memory."""
        if remote is None:
            return None
        lacking = [rank for rank in remote.owner.place.ranks if rank not in holders]
        found = self._copies(remote, lacking)
        rows = [wire.raw(each) for each in found.values()]
        size = sum(map(len, rows))
        if len(found) < len(lacking) or size > wire.INLINE_BYTES:
            return None
        of_worker = [lacking.index(rank) if rank in lacking else -1 for rank in range(self._mesh.workers)]
        shape = remote.type.local_shape(remote.owner.place.mesh)
        given = Blocks(remote.type, shape, rows, of_worker, size // len(rows))
        data = b"".join(row.numpy().tobytes() for row in rows)
        record = given.head(remote.id, wire.INLINE, slice(0, len(rows[0]))) + data
        step = Step(f"put {remote.type}", place=remote.step.place)
        step.again = Replay(record, puts=(remote.id,))
        return step

    def _heal(self, states: Sequence[tuple[str, Handle]], give_up: bool) -> None:
        connection, state, mesh = self.connection, self.state, self._mesh
        start = time.monotonic()
        found = self._survey()
        if found.way_back is None and (lost := self._refused(found.lost, states)):
            message, hint = self._lost_text(lost)
            if not give_up:
                raise LostError(message, hint=hint)
            self._drop_waiting(message)
            found = self._survey()  # the values that only those steps need are of no use any more
        gone = dict(sorted(state.gone.items()))
        pairs, again, way_back = found.pairs, found.again, found.way_back
        made: set[int] = set()
        if way_back is None:
            self._mark_lost(found.lost)
        else:
            assert self.kept_snapshots is not None
            pairs, again, made = {}, [], self.kept_snapshots.made()
            replay = self.kept_snapshots.replay()
            self._waiting = deque((*replay, *(step for step in self._waiting if step not in set(replay))))
        for record in self._records.values():
            record.loaded = False
        connection.healing = self._restoring = True
        connection.renew()
        if self._checks is not None:
            self._checks.left()
        who = [f"worker {state.coordinates_of(rank)} {how}" for rank, how in gone.items()]
        logger.info("healing %s: %s", mesh, "; ".join(who))
        stray = list(found.held - found.values.keys()) if way_back is None else []
        self._free(stray)
        copying = []
        for (sources, dims), each in pairs.items():
            for source, target in sources:
                size = sum(worker_bytes(type_, dims) for type_ in each.values())
                logger.info(
                    "healing %s: %d tensors, %s, from worker %s to %s",
                    *(mesh, len(each), memory.mebibytes(size)),
                    *(state.coordinates_of(source), state.coordinates_of(target)),
                )
            for record_ in copies(each, dims, sources):
                copying.append(Step("copy"))
                connection.command(copying[-1], record_)
        if way_back is not None:
            steps = sum(step.commits for step in self._waiting)
            logger.info("healing %s: from the last snapshot, repeating the %d steps after it", mesh, steps)
        for record_ in way_back or ():
            copying.append(Step("copy"))
            connection.command(copying[-1], record_)
        for step in again:
            self._give_again(step)
        while self._waiting:
            self._give_again(self._waiting[0])
            self._waiting.popleft()
        self._free(list(made - {handle.id for handle in self._handles.live()}))
        connection.publish()
        self._restoring = False
        connection.catch_up(state.next_command)
        for step in copying:
            state.check(step)
        logger.info("healing %s: done in %.0f ms", mesh, 1000 * (time.monotonic() - start))

    def _free(self, ids: Sequence[int]) -> None:
        """Have the workers drop values that nobody refers to."""
        for first in range(0, len(ids), wire.FREE_AT_ONCE):
            self.connection.command(Step("free"), wire.numbers(wire.FREE, *ids[first : first + wire.FREE_AT_ONCE]))

    def _give_again(self, step: Step) -> None:
        step.noted, step.ended, step.sequence, step.staged, step.error = False, False, -1, None, None
        self._give(step)

    def _fail_dependent(self) -> None:
        """Steps that wait and need a result of a failed step cannot be given again."""
        causes = {handle.id: handle.step.error for handle in self._handles.live() if handle.step.error is not None}
        for step in tuple(self._waiting):
            cause = next((causes[id] for id in operands(step, self.place) if id in causes), None)
            if cause is not None:
                assert step.again is not None
                causes |= dict.fromkeys(step.again.makes, cause)
                self._waiting.remove(step)
                self.state.depend(step, cause)

    def _needed(self) -> dict[int, Located]:
        """The values that workers need before they get steps again."""
        waiting = set(self._waiting)
        makes = {id for step in waiting if step.again is not None for id in step.again.makes}
        values: dict[int, Located] = {}
        for handle in self._handles.live():
            if handle.step.error is not None:
                handle.taken_by = handle.step  # reading it raises this error
            elif (
                handle.step.noted and handle.id not in makes and (handle.taken_by is None or handle.taken_by in waiting)
            ):
                values[handle.id] = located(handle)
        for step in waiting:
            values.update((id, value) for id, value in operands(step, self.place).items() if id not in makes)
        return values

    def _refused(self, lost: Mapping[int, Located], states: Sequence[tuple[str, Handle]]) -> list[tuple[str, Located]]:
        """The lost values among states, and among the values that steps which are given again need."""
        needed = {id for step in self._waiting for id in operands(step, self.place)}
        return self._lost_states(lost, states) + [("an argument", lost[id]) for id in needed & lost.keys()]

    def _drop_waiting(self, why: str) -> None:
        """Give up the steps that were to run again: all state goes back, to before them."""
        logger.warning("%s", why)
        self._gave_up = True
        cause = DeviceMeshError(
            f"the step was dropped when the mesh was healed: {why}", hint="the state has gone back to a checkpoint."
        )
        for step in tuple(self._waiting):
            step.dropped = True
            self.state.depend(step, cause)
        self._waiting.clear()

    def _mark_lost(self, lost: Mapping[int, Located]) -> None:
        """Mark lost values, so that reading them raises the reason."""
        for handle in self._handles.live():
            if handle.id in lost:
                step = Step("lost")
                step.sequence = 0
                message, hint = self._lost_text([("the value", located(handle))])
                step.error = LostError(message, hint=hint)
                handle.step = handle.taken_by = step
                logger.warning("healing %s: a value is lost: %s", self._mesh, handle.type)

    def _lost_states(
        self, lost: Mapping[int, Located], states: Sequence[tuple[str, Handle]]
    ) -> list[tuple[str, Located]]:
        """The states among the lost values."""
        found: list[tuple[str, Located]] = []
        for name, handle in states:
            with suppress(MonarchError):
                assert isinstance(handle, RemoteTensor)
                recovered = self.state.newest(handle)
                if recovered.id in lost:
                    found.append((name, located(recovered)))
        return found

    def _lost_text(self, lost: Sequence[tuple[str, Located]]) -> tuple[str, str]:
        """Message and hint for values that no worker holds whole any more."""
        state = self.state
        who = "; ".join(f"worker {state.coordinates_of(rank)} {how}" for rank, how in sorted(state.gone.items()))
        listed = [f"  {value_line(name, value.type, value.place.mesh)}" for name, value in lost]
        shown = "\n".join(listed[:16] + [f"and {len(listed) - 16} more"] * (len(listed) > 16))
        over = {name for _, value in lost for name in value.type.layout.mesh_dims}
        advice = "mesh.snapshots(every=10) has another worker keep a copy of such tensors."
        if self.kept_snapshots is not None:
            advice = "The workers that kept copies of them have ended too: mesh.snapshots(every=10, copies=2) has more."
        return (
            f"{len(lost)} tensor{'s' * (len(lost) != 1)} of {self._mesh} cannot be restored: {who}",
            f"no other worker holds the same blocks of\n{shown}\n"
            f"A mesh dim along which a tensor is replicated keeps it; these are not over {', '.join(sorted(over))}.\n"
            f"{advice}\nMake a new mesh, and start again from the last checkpoint.",
        )
