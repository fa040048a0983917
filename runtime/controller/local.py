"""The connection to workers on this host, in processes of their own or in those of actors.

Commands go through shared memory. The controller reads the workers' messages at its own calls: there is no thread for
it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch.compiler.kernels.cpp.build import build_kernels
from monarch.compiler.plan import MeshSpec, MonarchError, Plan
from monarch.runtime.controller.connection import SLEEP_MILLISECONDS, ActorProcesses, Connection
from monarch.runtime.controller.state import fresh
from monarch.runtime.controller.steps import Step
from monarch.runtime.processes.looking import Exit, WorkerProgress
from monarch.runtime.processes.workers import EXIT_SECONDS, Processes, Workers
from monarch.runtime.shared import signals, wire
from monarch.runtime.shared.definitions import definitions
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.results import Results
from monarch.runtime.shared.window import STAGING_BYTES

_LOOK_SECONDS = 0.04  # a sleep that nobody ends is longer
_STAGING_KEEP = 8 << 20


class LocalConnection(Connection):
    """To workers on this host, through memory that they share with the controller."""

    def __init__(
        self,
        mesh: MeshSpec,
        lost: Callable[[], None],
        actor_processes: ActorProcesses | None = None,
        processes: Processes | None = None,
    ) -> None:
        """In processes of their own, or in those that `actor_processes` names and `processes` reaches."""
        super().__init__(mesh, lost)
        self.actor_processes = actor_processes
        self.workers = Workers(mesh, processes=processes)
        self.results = {rank: Results.at(self.workers.window, rank) for rank in range(mesh.workers)}
        self._reports = 0  # how many failures are known

    def packed(self, plan: Plan) -> bytes:
        """A pickle, made and read by processes of one program: workers are forks of this one's."""
        return pack_plan(plan)

    def try_to_give(
        self, step: Step, last: Step, record: bytes | Callable[[int], bytes], parts: Sequence[Any], plan: bytes
    ) -> bool:
        state, finished = self.state, self.state.finished_commands
        if parts:
            staged = sum(len(part) for part in parts)
            step.staged = self.staging.reserve(staged, finished), staged
            self._stage(step.staged[0] % STAGING_BYTES, parts, last)
        body = (
            record
            if isinstance(record, bytes)
            else record(0 if step.staged is None else step.staged[0] % STAGING_BYTES)
        )
        at, size, turn, back, view, packed = self.workers.ring.room(body, finished)
        if plan:
            self.workers.hand(wire.unpack_numbers(body)[1], plan)
        step.sequence, step.at = last.sequence + 1, (at, size)
        same, other = (back, packed, step, True), (turn, view)
        turn[:], view[:], state.last, given = same if state.last is last else (*other, state.last, False)
        return given

    def _stage(self, offset: int, parts: Sequence[Any], last: Step) -> None:
        """Copy buffers into the staging area, one after the other, as long as the workers get no other step meanwhile,
        which may use the same room."""
        window, state = self.workers.window, self.state
        at = window.geometry.staging + offset
        for part in parts:
            row = memoryview(part).cast("B")
            room = window.bytes[at : at + len(row)]
            room[:] = row if state.last is last else room
            at += len(row)

    def taken(self, step: Step) -> None:
        at, size = step.at
        self.workers.ring.space.take(at, size, step.sequence)

    def publish(self) -> None:
        self.workers.ring.publish()

    def refresh(self) -> None:
        self._took(self.workers.finished())

    def _took(self, done: int) -> None:
        """The workers have finished so many commands, and perhaps more."""
        self._read(self.workers.reports())
        self.state.finished(done)
        if not self.staging.in_use(done) and self.staging.touched > _STAGING_KEEP:
            window = self.workers.window
            window.give_back(window.geometry.staging, STAGING_BYTES)
            self.staging.touched = 0

    def _read(self, reports: int) -> None:
        """Read what there is, unless there have been just so many failures and all are known."""
        if reports == self._reports:
            return
        for rank, packet, file in self.workers.packets():
            self.replies.take(rank, packet, file)
        self._reports = reports if reports >= 0 else self._reports

    def catch_up(self, commands: int, place: Place | None = None) -> None:
        with self.lock:
            self.publish()
        words, looked = self.workers.signals.words, time.monotonic()

        def check(seen: int) -> None:
            nonlocal looked
            # A worker that has finished a command is all that most wakes say; a look costs as much as a small step.
            if words[signals.DEAD] or time.monotonic() - looked > _LOOK_SECONDS:
                self._look()
                looked = time.monotonic()

        if self.state.finished_commands < commands:
            self.workers.wait(commands, check, None if place is None else place.ranks)
        with self.lock:
            if place is None:
                self.refresh()
                return
            by = self.workers.finished_by()
            self._took(min(by.values()))
            self.state.finished_by(by)

    def give_up_steps(self, first: int, behind: int) -> bool:
        if self.finished() > first:
            return False
        self.interrupted = True
        self.workers.stop_steps(first, behind)
        return True

    def _look(self) -> None:
        with self.lock:
            self.ready()
            self.state.died(self.workers.exits())
            self.ready()
            self._read(-1)

    def gather(self, step: Step, ranks: set[int]) -> None:
        self.catch_up(step.sequence + 1, step.place)  # a worker answers a command before it has finished it
        with self.lock:
            self._read(-1)

    def _sleep(self, ranks: list[int]) -> None:
        self.workers.sleep(ranks, SLEEP_MILLISECONDS)

    def memory(self) -> dict[int, int]:
        return self.workers.memory()

    def pids(self) -> list[int]:
        with self.lock:
            workers = self.workers
            while len(workers.pids) < self.mesh.workers:
                self.state.died(workers.exits(EXIT_SECONDS))
                self.ready()
            return [workers.pids[rank] for rank in range(self.mesh.workers)]

    def ready(self, program: str = "") -> None:
        workers = self.workers
        if self.closing or self.state.dead is not None or workers.signals.words[signals.DEAD] or workers.lost_at_once:
            super().ready(program)

    def news(self) -> None:
        if self.state.dead is None and self.workers.signals.words[signals.DEAD]:
            known = [Exit(rank, how) for rank, how in self.state.gone.items()]  # `died` was interrupted
            self.state.died(known or self.workers.exits(EXIT_SECONDS) or self.workers.missed())
        if self.state.dead is None and self.workers.lost_at_once:
            self._all_gone()
            self.state.give_up(
                f"the mesh {self.mesh} has lost its workers: the process that they were forked from has ended",
                "All values on the mesh are lost with it: make a new mesh, and start again from the last checkpoint.",
            )

    exact = True

    def take_in(self) -> None:
        self.state.died(self.workers.exits())
        self.news()
        if self.state.dead is not None:
            raise fresh(self.state.dead)

    def finished(self) -> int:
        return self.workers.finished()

    def asked(self) -> int:
        published = self.workers.signals.words[signals.HEAD] >= self.workers.ring.space.head
        return self.state.next_command if published else self.workers.finished()

    def marks(self) -> Sequence[int]:
        return self.workers.marks()

    def seen(self) -> Mapping[int, WorkerProgress]:
        return self.workers.seen()

    def stopped(self) -> list[int]:
        return self.workers.stopped()

    def lose(self, rank: int, how: str) -> None:
        self.state.died([Exit(rank, how)])
        self.workers.mark_dead(rank)

    def say(self, rank: int, packet: bytes) -> None:
        self.workers.send(rank, packet)

    def _hear(self) -> None:
        self.state.died(self.workers.exits() or self.workers.missed())
        if self.workers.lost_at_once:
            self._all_gone()
        self._read(-1)

    def _all_gone(self) -> None:
        for rank in range(self.mesh.workers):
            self.state.gone.setdefault(rank, "ended with the process that it was forked from")

    def _stop_all(self) -> None:
        self.workers.mark_dead(min(self.state.gone, default=0))

    def _renew(self, first: int, ranks: Sequence[int]) -> None:
        if self.actor_processes is not None:
            raise MonarchError(
                f"the mesh {self.mesh} cannot be healed: its workers are in processes of actors",
                hint="start the processes again, and make a new mesh in them.",
            )
        self.workers.renew(first, ranks)
        self._reports = 0

    def _close(self) -> None:
        self.workers.stop()


def pack_plan(plan: Plan) -> bytes:
    """A plan, the path of the object that has its kernels, and the custom ops that it calls, for workers forked on this
    host."""
    native = plan.target == "cpu"
    kernels = build_kernels([step.args[1] for step in plan.all_instructions if native and step.op == "kernel"])
    return pickle.dumps((plan, kernels, definitions(plan)))
