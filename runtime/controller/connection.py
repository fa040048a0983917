"""The connection of a controller with the workers of its mesh.

The connection writes commands and waits for them; their meaning is the executor's. This module has the part that is the
same wherever the workers are; `local.py` has the connection to those on this host, `hosts.remote` that to other hosts.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monarch.compiler.execution.events import Failure, tell
from monarch.compiler.plan import MeshSpec, MonarchError, Plan
from monarch.runtime.controller.replies import Replies
from monarch.runtime.controller.state import ControllerState, fresh
from monarch.runtime.controller.steps import Step
from monarch.runtime.processes.looking import WorkerProgress
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.results import Results
from monarch.runtime.shared.ring import Full, Space
from monarch.runtime.shared.window import STAGING_BYTES

SLEEP_MILLISECONDS = 50
PATIENCE = 10.0  # seconds in which workers end their session, once one of them has died
_STOPPED_SECONDS = 1.0  # after which those that do not answer are asked whether a signal has stopped them


@dataclass(frozen=True)
class ActorProcesses:
    """Processes of actors in which the workers of a mesh are."""

    name: str
    """The mesh's name there."""
    processes: tuple[str, ...]
    """By rank."""
    owner: str
    """The process that drives the mesh."""


class Connection(ABC):
    """The started workers of a mesh. Safe to use from several threads; methods whose docstrings say so are called with
    `lock` held.

    It calls `lost` when it finds that workers have ended.
    """

    def __init__(self, mesh: MeshSpec, lost: Callable[[], None]) -> None:
        self.mesh = mesh
        self.state = ControllerState(mesh, lambda error: tell(Failure(mesh, error)))
        self.replies = Replies(self.state)
        self.lock = threading.RLock()
        self.closing = False
        self.is_parents = False
        """Whether this process is a fork of the one that the mesh is of."""
        self.told = False
        """Whether the mesh's end was raised to somebody."""
        self.lost = lost
        self.staging = Space(STAGING_BYTES, restart=True)
        self.healing = False
        self._concluded = False  # the answers of a death's survivors are known until they are waited for
        self._patience = 0.0  # until when they are waited for
        self.actor_processes: ActorProcesses | None = None
        self.hosts = 1
        self.interrupted = False
        """Whether steps were given up, so that Python and state are to go back to the last one that was not."""
        self.elsewhere = ""
        """Where healing puts the places of lost hosts: see `Executor.heal`."""
        self.results: dict[int, Results] = {}
        """Where workers copy small results to, by rank: all on this host, and of those on others the ones that have
        ended."""
        self._next_answer = -1
        _connections.add(self)

    # -- commands --------------------------------------------------------------------------------------------------

    def enter(self, program: str = "") -> None:
        """Finish what an interrupted call has begun, and raise where the mesh cannot take a command, of a program of
        this name if of any. With the lock held."""
        if (step := self.state.last).bind is not None or not step.noted:
            self._note(step)
        self.ready(program)
        if self.healing:  # further up in this thread: this is a signal's handler
            raise MonarchError(f"the mesh {self.mesh} is being healed", hint="use it when heal_mesh has returned.")

    def look(self) -> None:
        """Find out whether a worker has died. With the lock held."""
        self._hear()
        self.news()

    def settle(self) -> None:
        """Do what follows from the newest step's being given to the workers, where a call was interrupted in it, or is
        still in it, further up in this thread. With the lock held."""
        if (step := self.state.last).bind is not None or not step.noted:
            self._note(step)

    def command(
        self, step: Step, record: bytes | Callable[[int], bytes], parts: Sequence[Any] = (), plan: bytes = b""
    ) -> None:
        """Give the workers a step; they see it after `publish`. With the lock held.

        With `parts`, buffers for them to read from the staging area, `record` gets their offset there; each worker gets
        `plan`. Whatever interrupts this, the workers get the whole step or none of it. Where they get it before this
        returns, `settle` does the rest.
        """
        given = False
        while not given:
            try:
                given = self.try_to_give(step, self.state.last, record, parts, plan)
            except Full as full:
                self.catch_up(full.sequence + 1)
                continue
            for handle in step.donated if not given else ():  # a signal's handler has given other steps meanwhile
                self.state.refuse_donated(handle, "a value that the step takes")
        self._note(step)

    def _note(self, step: Step) -> None:
        """The effects of giving a step. Doing them again changes nothing."""
        self.taken(step)
        if step.staged is not None:
            self.staging.take(*step.staged, step.sequence)
        if step.expects:
            self.replies.expect(step.sequence)
        self.state.note(step)
        if (bind := step.bind) is not None:
            try:
                step.undo = bind()
            except Exception:  # once is enough
                step.bind = None
                raise
            step.bind = None

    @abstractmethod
    def packed(self, plan: Plan) -> bytes:
        """A plan in the form in which it goes to the workers, its kernels built where that is done here."""

    @abstractmethod
    def try_to_give(
        self, step: Step, last: Step, record: bytes | Callable[[int], bytes], parts: Sequence[Any], plan: bytes
    ) -> bool:
        """Give the workers a step, if `last` is still the newest: whether it was. Raises Full."""

    @abstractmethod
    def taken(self, step: Step) -> None:
        """Note how much of the ring the step takes. To note it again changes nothing."""

    @abstractmethod
    def publish(self) -> None:
        """Let the workers see all commands that are written. With the lock held."""

    @abstractmethod
    def refresh(self) -> None:
        """Take note of the steps that the workers have finished, without waiting. With the lock held."""

    # -- waiting ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def catch_up(self, commands: int, place: Place | None = None) -> None:
        """Wait until all workers have finished so many commands; with a place, until those there have, and not longer
        for others than is needed to know. Raises DeviceMeshError where the mesh is lost."""

    @abstractmethod
    def give_up_steps(self, first: int, behind: int) -> bool:
        """See `Executor.give_up`: commands from the first on, before another one. Whether any is."""

    def gather(self, step: Step, ranks: set[int]) -> None:
        """Wait for the answers of `ranks` to a command, and until all workers that it concerns have finished it."""
        while True:
            self._look()
            with self.lock:
                pending = self.replies.pending(step.sequence, ranks)
            if not pending:
                break
            self._sleep(pending)
        self.catch_up(step.sequence + 1, step.place)

    @abstractmethod
    def _look(self) -> None:
        """While waiting: read the workers' messages, and raise where there is nothing left to wait for."""

    @abstractmethod
    def _sleep(self, ranks: list[int]) -> None:
        """Wait a little, at most until one of `ranks` sends something."""

    def clock_offsets(self) -> dict[int, int]:
        """How many nanoseconds the controller's clock is ahead of a worker's, by rank, for those on other hosts."""
        return {}

    def measured(self, buffers: dict[int, torch.Tensor]) -> None:  # noqa: B027  local ones are mapped here
        """Fill the buffers of workers on other hosts with the measurements made there."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The workers' process ids, by rank, once all have started."""

    @abstractmethod
    def memory(self) -> dict[int, int]:
        """The bytes of memory that the workers hold, by rank, as far as is known; on other hosts, when this was last
        asked. Takes no lock, and waits for nothing."""

    @abstractmethod
    def news(self) -> None:
        """Where a worker is known to have died, find out which and how. With the lock held."""

    def ready(self, program: str = "") -> None:
        """Raise where the mesh is closed or lost."""
        if self.is_parents:
            raise MonarchError(
                f"the mesh {self.mesh} is of the process that this one was forked from",
                hint="use it there: a DataLoader's worker or another child makes plain tensors. A child may "
                "make a mesh of its own.",
            )
        if self.closing:
            raise MonarchError(f"the mesh {self.mesh} is closed")
        self.news()
        if self.state.dead is not None:
            self.told = True
            self.lost()
            if not self._concluded and self.actor_processes is None:
                self.await_survivors(PATIENCE)
            raise self.state.refused(program)

    # -- being watched (see `liveness`) ----------------------------------------------------------------------------

    exact: bool

    @abstractmethod
    def take_in(self) -> None: ...

    @abstractmethod
    def finished(self) -> int: ...

    @abstractmethod
    def asked(self) -> int: ...

    @abstractmethod
    def marks(self) -> Sequence[int]: ...

    @abstractmethod
    def seen(self) -> Mapping[int, WorkerProgress]: ...

    def host_of(self, rank: int) -> str:
        """The address of the host that a worker is on; empty for this machine."""
        return ""

    def stopped(self) -> list[int]:
        """The workers that a signal has stopped."""
        return [rank for rank, seen in self.seen().items() if seen.stopped]

    @abstractmethod
    def lose(self, rank: int, how: str) -> None: ...

    # -- after a death -----------------------------------------------------------------------------------------------

    def await_survivors(self, seconds: float, anew: bool = False) -> bool:
        """Once the mesh has lost a worker, wait until the others have ended their session: then it is known which steps
        are done. Whether they have, after so many seconds at most, of all calls together unless `anew`; after less
        where all that are waited for have been stopped. With the lock held."""
        if self._concluded:
            return True
        now = time.monotonic()
        self._patience = now + seconds if anew else self._patience or now + seconds
        look = now + _STOPPED_SECONDS
        state, answered = self.state, set[int]()
        self._stop_all()
        for rank in state.expected:
            self.say(rank, wire.numbers(wire.HOW_FAR))
        while not self._concluded:
            self._hear()
            if state.is_quiet:
                state.conclude()
                self._concluded = True
            elif not state.expected:
                for rank, (step, committed) in state.verdicts().items():
                    if rank not in answered:
                        self.say(rank, wire.numbers(wire.VERDICT, step, committed))
                        answered.add(rank)
            if (now := time.monotonic()) > self._patience:
                break
            if now > look and state.expected:
                look = now + _STOPPED_SECONDS
                if set(state.expected) <= set(self.stopped()):
                    break
            if not self._concluded:
                self._sleep([rank for rank in range(self.mesh.workers) if rank not in state.quiet.keys() | state.gone])
        return self._concluded

    def ask_survivors(self, records: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """The answers of workers that have ended their session, by rank: each is asked with its kind of packet, and the
        text behind the answer's number. Raises DeviceMeshError where one ends meanwhile."""
        number = self._next_answer = self._next_answer - 1
        self.replies.expect(number)
        try:
            for rank, (kind, *rest) in records.items():
                self.say(rank, wire.numbers(kind, number, *rest))
            while pending := [rank for rank in self.replies.pending(number, records) if rank not in self.state.gone]:
                self._hear()
                self._sleep(pending)
            if any(rank in self.state.gone for rank in records):
                assert self.state.dead is not None
                raise fresh(self.state.dead)
            return self.replies.of(number)
        finally:
            self.replies.forget(number)

    def renew(self) -> None:
        """Begin a new session, with the workers that live and new ones for the others. With the lock held.
        Raises MonarchError where that cannot be."""
        self._concluded, self._patience, self.told = False, 0.0, False
        self.staging = Space(STAGING_BYTES, restart=True)
        dead, gone, before = self.state.dead, dict(self.state.gone), self.state.first
        self.state.renewed()
        try:
            self._renew(self.state.next_command, sorted(gone))
        except BaseException:
            self.state.dead = self.state.dead or dead
            self.state.gone |= gone
            self.state.first = before  # workers may not have heard of this session, and speak of the one before
            raise

    @abstractmethod
    def say(self, rank: int, packet: bytes) -> None:
        """Hand a packet to one worker."""

    @abstractmethod
    def _hear(self) -> None:
        """Read the workers' messages, also of deaths. With the lock held."""

    @abstractmethod
    def _stop_all(self) -> None:
        """Have all workers end their session."""

    @abstractmethod
    def _renew(self, first: int, ranks: Sequence[int]) -> None:
        """Start a session whose first command has this number, with new workers for these places."""

    # -- hosts that join ---------------------------------------------------------------------------------------------

    @property
    def free_hosts(self) -> int:
        """How many have joined and run none of the mesh's workers."""
        return 0

    def move(self, ranks: Collection[int]) -> bool:
        """Have workers, of these, that share a host with others go to hosts that have joined, as many as can. They
        count as ended from now on, and healing starts them there. Whether there are any. With the lock held."""
        return False

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.closing = True  # seen by every thread that waits with the lock
        with self.lock:
            self._close()

    @abstractmethod
    def _close(self) -> None: ...


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child of this process: the meshes are the parent's, and commands from here would mix with its own."""
    for connection in list(_connections):
        connection.closing = connection.is_parents = True
        lock: Any = connection.lock
        if not lock._is_owned():  # a thread may hold it that is not in this process
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork)
