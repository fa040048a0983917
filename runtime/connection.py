"""What connects a controller with the workers of its mesh: their processes, the memory that all of them see, the ring
of commands in it, and the sockets on which they answer.

Commands are written here and waited for here; what they mean is the controller's business. What workers say is read
when the controller happens to come by: there is no thread for it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable

from monarch.compiler.plan import MeshSpec, MonarchError
from monarch.runtime import futex, memory, signals
from monarch.runtime.controller_state import ControllerState, Step, fresh
from monarch.runtime.processes import WarmParent, warm_parent
from monarch.runtime.replies import Replies
from monarch.runtime.ring import Full, RingWriter, Space
from monarch.runtime.window import RING_BYTES, STAGING_BYTES, Geometry, Window

WORKERS_PER_CORE = 64
_WORKER_BYTES = 8 << 20  # what a forked worker has of its own before it computes anything
_STAGING_KEEP = 8 << 20
_EXIT_SECONDS = 2.0


class Connection:
    """The started workers of a mesh. Safe to use from several threads; what says so is called with `lock` held.

    `lost` is called when it is found that workers have ended.
    """

    def __init__(self, mesh: MeshSpec, lost: Callable[[], None]) -> None:
        geometry = Geometry.of(mesh.workers)
        _check_size(mesh, geometry)
        self.mesh = mesh
        self.state = ControllerState(mesh)
        self.lock = threading.RLock()
        self.closing = False
        self._lost = lost

        warm = warm_parent()
        fd = Window.create(geometry)
        ends: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            for _ in range(mesh.workers):
                mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                mine.setblocking(False)
                ends.append(mine)
                theirs.append(other)
            self.window = Window(geometry, fd)
            threads = max(1, signals.cores() // mesh.workers)
            number = warm.start(mesh, fd, theirs, threads)
        except OSError as error:
            for end in ends:
                end.close()
            raise MonarchError(
                f"cannot start {mesh.workers} workers: {error}",
                hint="A limit is reached: on open files (ulimit -n), of which each worker takes one, or processes\n"
                "(ulimit -u).",
            ) from error
        finally:
            os.close(fd)
            for end in theirs:
                end.close()
        self._warm = warm
        self._number = number
        self.signals = self.window.signals()
        self.signals.spins = 0
        memory_ = self.window.bytes
        self.ring = RingWriter(memory_[geometry.ring : geometry.ring + RING_BYTES], self.signals)
        self._staging = Space(STAGING_BYTES, restart=True)
        self.replies = Replies(ends, self.state)
        self._pids: dict[int, int] = {}
        self._stop = weakref.finalize(self, _stop, warm, number, ends, os.getpid())
        _connections.add(self)

    # -- commands --------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Raise where the mesh cannot take a command. With the lock held."""
        if self.ring.records != self.state.next_command:
            # Only what may be raised anywhere, such as KeyboardInterrupt, can come between the two.
            self.state.give_up(
                f"the mesh {self.mesh} was interrupted while a command was being written",
                "It cannot be used any more: close it, and make a new one.",
            )
        self._ready()

    def write(self, record: bytes, command: int) -> None:
        """Write a command, which the workers see when the ring is published. With the lock held."""
        while True:
            try:
                self.ring.write(record, command, self.state.finished_commands)
                return
            except Full as full:
                self.catch_up(full.sequence + 1)

    def stage(self, size: int, command: int) -> int:
        """Room in the staging area, until `command` is finished. With the lock held."""
        while True:
            try:
                at = self._staging.reserve(size, self.state.finished_commands)
            except Full as full:
                self.catch_up(full.sequence + 1)
                continue
            self._staging.take(at, size, command)
            return at % STAGING_BYTES

    def refresh(self) -> None:
        """Take note of what the workers have finished, without waiting. With the lock held."""
        done = self.signals.all_done()
        self.replies.read(self.signals.reports())
        self.state.finished(done)
        if not self._staging.in_use(done) and self._staging.touched > _STAGING_KEEP:
            self.window.give_back(self.window.geometry.staging, STAGING_BYTES)
            self._staging.touched = 0

    # -- waiting ---------------------------------------------------------------------------------------------------

    def catch_up(self, commands: int) -> None:
        """Wait until all workers have finished so many commands. Raises DeviceMeshError where the mesh is lost."""
        with self.lock:
            self.ring.publish()
        words, looks = self.signals.words, 0

        def check(seen: int) -> None:
            nonlocal looks
            looks += 1
            if looks > 1 or words[signals.DEAD]:
                self._look()

        if self.state.finished_commands < commands:
            for rank in range(self.mesh.workers):
                index = signals.line_of(rank) + signals.DONE
                if words[index] < commands:
                    self.signals.wait(index, commands, check)
        with self.lock:
            self.refresh()

    def gather(self, step: Step, ranks: set[int]) -> None:
        """Wait for the answers of `ranks` to a command, and until all workers have finished it."""
        while True:
            self._look()
            with self.lock:
                pending = self.replies.pending(step.sequence, ranks)
            if not pending:
                break
            self.replies.sleep(pending)
        self.catch_up(step.sequence + 1)

    def pids(self) -> list[int]:
        """The workers' process ids, by rank, once all have started."""
        with self.lock:
            while len(self._pids) < self.mesh.workers:
                self._read_deaths(_EXIT_SECONDS)
                self._ready()
            return [self._pids[rank] for rank in range(self.mesh.workers)]

    def _look(self) -> None:
        """While waiting: take in what has come, and raise where there is nothing left to wait for."""
        with self.lock:
            self._ready()
            self._read_deaths(0.0)
            self._ready()
            self.replies.read(-1)

    def _ready(self) -> None:
        """Raise where the mesh is closed or lost."""
        if self.closing:
            raise MonarchError(f"the mesh {self.mesh} is closed")
        state = self.state
        if state.dead is None and self.signals.words[signals.DEAD]:
            self._read_deaths(_EXIT_SECONDS)
        elif state.dead is None and not self._warm.alive:
            state.give_up(
                f"the mesh {self.mesh} has lost its workers: the process that they were forked from has ended"
            )
        if state.dead is not None:
            self._lost()
            raise fresh(state.dead)

    def _read_deaths(self, seconds: float) -> None:
        exits: list[tuple[int, str]] = []
        for message in self._warm.messages(self._number, seconds):
            if message["is"] == "started":
                self._pids[message["rank"]] = message["pid"]
            elif message["is"] == "exited":
                exits.append((message["rank"], _how(message["status"])))
        self.state.died(exits)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.closing = True  # seen by whoever waits with the lock held
        with self.lock:
            if self._stop.alive:
                self._stop()
                geometry = self.window.geometry
                self.window.give_back(geometry.ring, geometry.total - geometry.ring)


def _stop(warm: WarmParent, number: int, ends: list[socket.socket], owner: int) -> None:
    if os.getpid() == owner:
        warm.stop(number)
    for end in ends:
        end.close()


def _check_size(mesh: MeshSpec, geometry: Geometry) -> None:
    if not futex.supported():
        raise MonarchError("local workers need Linux, on a processor whose futex call is known")
    most = WORKERS_PER_CORE * signals.cores()
    if mesh.workers > most or mesh.workers < 1:
        raise MonarchError(
            f"{mesh} has {mesh.workers} workers, and this machine runs 1 to {most}",
            hint=f"it has {signals.cores()} cores, and at most {WORKERS_PER_CORE} workers a core make sense.\n"
            "To compile for a larger mesh without running, make it abstract.",
        )
    windows = geometry.total - STAGING_BYTES
    memory.require(windows + mesh.workers * _WORKER_BYTES, f"{mesh.workers} workers", memory.available_bytes)


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child of this process: the meshes are the parent's, and commands from here would mix with its own."""
    for connection in list(_connections):
        connection.closing = True


os.register_at_fork(after_in_child=_after_fork)
