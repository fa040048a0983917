"""What connects a controller with the workers of its mesh.

Commands are written here and waited for here; what they mean is the executor's business. This module holds what is the
same wherever the workers are, and the connection to workers on this host (`hosts.remote` has the one to other hosts).
What local workers say is read when the controller happens to come by: there is no thread for it.
"""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monarch.compiler.kernels.cpp.build import build_kernels
from monarch.compiler.plan import MeshSpec, MonarchError, Plan
from monarch.runtime.controller.replies import Replies
from monarch.runtime.controller.state import ControllerState, Step, fresh
from monarch.runtime.processes.workers import EXIT_SECONDS, Processes, Workers
from monarch.runtime.shared import signals
from monarch.runtime.shared.definitions import definitions
from monarch.runtime.shared.ring import Full, Space
from monarch.runtime.shared.window import STAGING_BYTES

SLEEP_MILLISECONDS = 50
_STAGING_KEEP = 8 << 20


@dataclass(frozen=True)
class ActorProcesses:
    """Processes of actors in which the workers of a mesh are."""

    name: str
    """What the mesh is called there."""
    processes: tuple[str, ...]
    """By rank."""
    owner: str
    """The process that drives the mesh."""


class Connection(ABC):
    """The started workers of a mesh. Safe to use from several threads; what says so is called with `lock` held.

    `lost` is called when it is found that workers have ended.
    """

    def __init__(self, mesh: MeshSpec, lost: Callable[[], None]) -> None:
        self.mesh = mesh
        self.state = ControllerState(mesh)
        self.replies = Replies(self.state)
        self.lock = threading.RLock()
        self.closing = False
        self.written = 0
        self.lost = lost
        self.staging = Space(STAGING_BYTES, restart=True)
        self.actor_processes: ActorProcesses | None = None
        _connections.add(self)

    # -- commands --------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Raise where the mesh cannot take a command. With the lock held."""
        if self.written != self.state.next_command:
            # Only what may be raised anywhere, such as KeyboardInterrupt, can come between the two.
            self.state.give_up(
                f"the mesh {self.mesh} was interrupted while a command was being written",
                "It cannot be used any more: close it, and make a new one.",
            )
        self.ready()

    def write(self, record: bytes, command: int) -> None:
        """Write a command, which the workers see after `publish`. With the lock held."""
        try:
            self._write(record, command)
        except Full:
            self._until_there_is_room(lambda: self._write(record, command))
        self.written += 1

    def stage(self, parts: Sequence[Any], command: int) -> int:
        """Put bytes where the workers find them until `command` is finished: the offset. With the lock held."""
        size = sum(len(part) for part in parts)
        at = self._until_there_is_room(lambda: self.staging.reserve(size, self.state.finished_commands))
        self.staging.take(at, size, command)
        self._stage(at % STAGING_BYTES, parts)
        return at % STAGING_BYTES

    def load(self, blob: bytes, number: int) -> None:
        """Write the command `number`, by which the workers load the plan that `packed` gave. With the lock held."""
        self._until_there_is_room(lambda: self._load(blob, number))
        self.written += 1

    def _until_there_is_room(self, act: Callable[[], Any]) -> Any:
        while True:
            try:
                return act()
            except Full as full:
                self.catch_up(full.sequence + 1)

    @abstractmethod
    def packed(self, plan: Plan) -> bytes:
        """A plan in the form in which it goes to the workers, its kernels built where that is done here."""

    @abstractmethod
    def _write(self, record: bytes, command: int) -> None: ...

    @abstractmethod
    def _stage(self, offset: int, parts: Iterable[Any]) -> None: ...

    @abstractmethod
    def _load(self, blob: bytes, number: int) -> None: ...

    @abstractmethod
    def publish(self) -> None:
        """Let the workers see what was written. With the lock held."""

    @abstractmethod
    def refresh(self) -> None:
        """Take note of what the workers have finished, without waiting. With the lock held."""

    # -- waiting ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def catch_up(self, commands: int) -> None:
        """Wait until all workers have finished so many commands. Raises DeviceMeshError where the mesh is lost."""

    def gather(self, step: Step, ranks: set[int]) -> None:
        """Wait for the answers of `ranks` to a command, and until all workers have finished it."""
        while True:
            self._look()
            with self.lock:
                pending = self.replies.pending(step.sequence, ranks)
            if not pending:
                break
            self._sleep(pending)
        self.catch_up(step.sequence + 1)

    @abstractmethod
    def _look(self) -> None:
        """While waiting: take in what has come, and raise where there is nothing left to wait for."""

    @abstractmethod
    def _sleep(self, ranks: list[int]) -> None:
        """Wait a little, at most until one of `ranks` sends something."""

    def clock_offsets(self) -> dict[int, int]:
        """How many nanoseconds the controller's clock is ahead of a worker's, by rank, for those on other hosts."""
        return {}

    def measured(self, buffers: dict[int, torch.Tensor]) -> None:  # noqa: B027  local ones are mapped here
        """Fill the buffers of workers on other hosts with what has been measured there."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The workers' process ids, by rank, once all have started."""

    @abstractmethod
    def news(self) -> None:
        """Where a worker is known to have died, find out who and how. With the lock held."""

    def ready(self) -> None:
        """Raise where the mesh is closed or lost."""
        if self.closing:
            raise MonarchError(f"the mesh {self.mesh} is closed")
        self.news()
        if self.state.dead is not None:
            self.lost()
            raise fresh(self.state.dead)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.closing = True  # seen by whoever waits with the lock held
        with self.lock:
            self._close()

    @abstractmethod
    def _close(self) -> None: ...


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

    def packed(self, plan: Plan) -> bytes:
        """A pickle, made and read by processes of one program: workers are forks of this one's."""
        return pack_plan(plan)

    def _write(self, record: bytes, command: int) -> None:
        self.workers.ring.write(record, command, self.state.finished_commands)

    def _stage(self, offset: int, parts: Iterable[Any]) -> None:
        self.workers.stage(offset, parts)

    def _load(self, blob: bytes, number: int) -> None:
        self.workers.load(number, blob, number, self.state.finished_commands)

    def publish(self) -> None:
        self.workers.ring.publish()

    def refresh(self) -> None:
        done = self.workers.finished()
        self._read(self.workers.reports())
        self.state.finished(done)
        if not self.staging.in_use(done) and self.staging.touched > _STAGING_KEEP:
            window = self.workers.window
            window.give_back(window.geometry.staging, STAGING_BYTES)
            self.staging.touched = 0

    def _read(self, reports: int) -> None:
        """Read what there is, unless there have been just so many failures and all are known."""
        if reports == self.replies.reports:
            return
        for rank, packet, file in self.workers.packets():
            try:
                self.replies.take(rank, packet, file)
            finally:
                if file >= 0:
                    os.close(file)

    def catch_up(self, commands: int) -> None:
        with self.lock:
            self.publish()
        words, looks = self.workers.signals.words, 0

        def check(seen: int) -> None:
            nonlocal looks
            looks += 1
            if looks > 1 or words[signals.DEAD]:
                self._look()

        if self.state.finished_commands < commands:
            self.workers.wait(commands, check)
        with self.lock:
            self.refresh()

    def _look(self) -> None:
        with self.lock:
            self.ready()
            self.state.died(self.workers.exits())
            self.ready()
            self._read(-1)

    def _sleep(self, ranks: list[int]) -> None:
        self.workers.sleep(ranks, SLEEP_MILLISECONDS)

    def pids(self) -> list[int]:
        with self.lock:
            workers = self.workers
            while len(workers.pids) < self.mesh.workers:
                self.state.died(workers.exits(EXIT_SECONDS))
                self.ready()
            return [workers.pids[rank] for rank in range(self.mesh.workers)]

    def news(self) -> None:
        if self.state.dead is None and self.workers.signals.words[signals.DEAD]:
            self.state.died(self.workers.exits(EXIT_SECONDS))
        if self.state.dead is None and self.workers.lost_at_once:
            self.state.give_up(
                f"the mesh {self.mesh} has lost its workers: the process that they were forked from has ended"
            )

    def _close(self) -> None:
        self.workers.stop()


def pack_plan(plan: Plan) -> bytes:
    """A plan, where the object lies that its kernels were built into, and the custom ops that it calls, for workers
    forked on this host."""
    native = plan.target == "cpu"
    kernels = build_kernels([step.args[1] for step in plan.instructions if native and step.op == "kernel"])
    return pickle.dumps((plan, kernels, definitions(plan)))


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child of this process: the meshes are the parent's, and commands from here would mix with its own."""
    for connection in list(_connections):
        connection.closing = True


os.register_at_fork(after_in_child=_after_fork)
