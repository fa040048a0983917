"""The worker processes of a mesh that run on this host, all of them or some, and the memory that they share.

Their driver writes commands here, and reads their progress here: the controller for a mesh on its own host, a host's
service for its part of a mesh.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from monarch.compiler.config import for_spawned
from monarch.compiler.plan import MeshSpec, MonarchError
from monarch.runtime.processes.looking import Exit, WorkerProgress, memory_of, state_of, stop, where_is
from monarch.runtime.processes.parent import drop, how_ended, warm_parent
from monarch.runtime.shared import futex, memory, signals, wire
from monarch.runtime.shared.ring import RingWriter
from monarch.runtime.shared.window import RING_BYTES, STAGING_BYTES, Geometry, Window

WORKERS_PER_CORE = 64
EXIT_SECONDS = 2.0
_WORKER_BYTES = 8 << 20  # the memory of a forked worker before it computes anything
_SEND_SECONDS = 0.05
_SEEN_SECONDS = 5.0
_MISSED_SECONDS = 1.0
_ROOM_FOR_A_FILE = (socket.CMSG_SPACE(4),)

Packet = tuple[int, bytes, int]
"""From a worker: its rank, its packet, and a file that came with it, or -1; `wire.LOST_FILE` where one came for which
this process had no descriptor left."""


class Processes(Protocol):
    """Where workers run: processes of their own (`parent.WarmParent`), or those of actors."""

    @property
    def alive(self) -> bool:
        """False once all workers are gone because the process that they depend on is."""

    def number(self) -> int:
        """A number for workers that are to be started."""

    def start(
        self,
        number: int,
        mesh: MeshSpec,
        ranks: Sequence[int],
        memory: int,
        sockets: list[socket.socket],
        threads: int,
        across: dict[str, Any] | None,
        settings: dict[str, Any],
        first: int = 0,
    ) -> None:
        """Start workers whose first command has the number `first`, beside those that there are of this `number`.
        Raises OSError where a limit is reached."""

    def messages(self, mesh: int, seconds: float = 0.0) -> deque[dict[str, Any]]:
        """The warm parent's messages about them ("started", "exited"); a caller that has acted on one drops it. Waits
        up to `seconds` where there are none."""

    def stop(self, mesh: int) -> None:
        """End them, if there are any, also from a finalizer."""

    def wait_ended(self, mesh: int) -> None:
        """Wait until they have ended."""


class Workers:
    """The workers for `ranks` of a mesh. Not thread-safe but for waiting; `stop` is called at the latest when this is
    collected.

    `across` is what workers need that have peers on other hosts (see `worker.peers`): it is handed to them as JSON.
    """

    def __init__(
        self,
        mesh: MeshSpec,
        ranks: range | None = None,
        across: dict[str, Any] | None = None,
        processes: Processes | None = None,
        settings: dict[str, Any] | None = None,
        first: int = 0,
    ) -> None:
        """`settings` are those of the program that the workers run for: this process's, unless given. `first` is the
        number of their first command."""
        self.mesh = mesh
        self.ranks = range(mesh.workers) if ranks is None else ranks
        geometry = Geometry.of(mesh.workers)
        _check_size(mesh, len(self.ranks), geometry)
        self._processes = processes = processes or warm_parent()
        self._given = (
            max(1, signals.cores() // len(self.ranks)),
            across,
            for_spawned() if settings is None else settings,
        )
        self.pids: dict[int, int] = {}
        """Of those that are known to have started, by rank."""
        self._inboxes: dict[int, deque[Any]] = {rank: deque() for rank in self.ranks}
        self.reported: dict[int, Exit] = {}
        self._ended: set[int] = set()
        """The workers whose processes had ended at the last look of `missed`."""
        self._look_at = 0.0
        self._owner = os.getpid()
        self.ends: dict[int, socket.socket] = {}
        self._number = processes.number()
        # Before they run, so that Ctrl-C leaves none that this object does not know.
        self._stop = weakref.finalize(self, _stop, processes, self._number, self.ends, self._owner)
        self._stop.atexit = False  # handlers of the program may use the mesh until its processes are ended
        fd = -1
        try:
            fd = Window.create(geometry)
            self.window = Window(geometry, fd)
            self._begin(first)
            self.signals = self.window.signals()
            self.ring = RingWriter(self.window.bytes[geometry.ring : geometry.ring + RING_BYTES], self.signals)
            self.ends.update(self._fork(self.ranks, fd, first))
        except OSError as error:
            raise _not_started(len(self.ranks), error) from error
        finally:
            if fd >= 0:
                os.close(fd)
        _all.add(self)

    def _fork(self, ranks: Sequence[int], memory: int, first: int) -> dict[int, socket.socket]:
        """Start workers for these ranks; gives the sockets to them."""
        ends: dict[int, socket.socket] = {}
        theirs: list[socket.socket] = []
        try:
            for rank in ranks:
                mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                mine.setblocking(False)
                ends[rank] = mine
                theirs.append(other)
            self._processes.start(self._number, self.mesh, ranks, memory, theirs, *self._given, first)
            return ends
        except (OSError, MonarchError) as error:
            for end in ends.values():
                end.close()
            if isinstance(error, MonarchError):
                raise
            raise _not_started(len(ranks), error) from error
        finally:
            for end in theirs:
                end.close()

    def renew(self, first: int, ranks: Sequence[int]) -> None:
        """Begin a session of the workers that have ended theirs, with new ones for `ranks`. Its first command has this
        number. The memory is the same: nobody writes there now."""
        geometry = self.window.geometry
        self._begin(first)
        self.ring = RingWriter(self.window.bytes[geometry.ring : geometry.ring + RING_BYTES], self.signals)
        here = [rank for rank in ranks if rank in self.ranks]
        for rank in here:  # before the new ones can say anything
            self.pids.pop(rank, None)
            self.reported.pop(rank, None)
        if here:
            null = os.open(os.devnull, os.O_RDONLY)  # the process that forks them has the memory
            try:
                ends = self._fork(here, null, first)
            finally:
                os.close(null)
            for rank in ends:
                self.ends[rank].close()
                self._inboxes[rank].clear()
            self.ends.update(ends)
        for rank in self.ranks:
            if rank not in ranks:
                self.send(rank, wire.numbers(wire.SESSION, first))

    def _begin(self, first: int) -> None:
        """Set the words that workers share to those of a session whose first command has this number."""
        words = self.window.words
        words[:] = memoryview(bytes(words.nbytes)).cast("q")
        words[signals.RELEASED] = first
        for rank in range(self.mesh.workers):
            line = signals.line_of(rank)
            words[line + signals.PROGRESS] = first << signals.STEP_BITS
            words[line + signals.DONE] = words[line + signals.OVER] = first

    # -- down ------------------------------------------------------------------------------------------------------

    def stage(self, offset: int, data: Any) -> None:
        """Copy bytes into the staging area."""
        at = self.window.geometry.staging + offset
        self.window.bytes[at : at + len(data)] = data

    def hand(self, number: int, blob: bytes) -> None:
        """Hand the plan `number` to each worker, as a file over its own socket, before it is commanded to load it."""
        fd = os.memfd_create("monarch-plan", os.MFD_CLOEXEC)
        try:
            rest = memoryview(blob)
            while rest:
                rest = rest[os.write(fd, rest) :]
            for rank in self.ranks:
                self.send(rank, wire.numbers(wire.LOAD, number), fd)
        finally:
            os.close(fd)

    def send(self, rank: int, packet: bytes, file: int = -1) -> None:
        """Hand a packet to one worker. One that has died is passed over: `exits` reports its death."""
        end = self.ends[rank]
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file]))] if file >= 0 else []
        with suppress(ConnectionError):
            while True:
                try:
                    end.sendmsg([packet], extra)
                    return
                except BlockingIOError:
                    if self.signals.words[signals.DEAD]:
                        return
                    select.select([], [end], [], _SEND_SECONDS)

    # -- up --------------------------------------------------------------------------------------------------------

    def finished_by(self) -> dict[int, int]:
        """How many commands each worker here has finished."""
        words = self.signals.words
        return {rank: words[signals.line_of(rank) + signals.DONE] for rank in self.ranks}

    def finished(self) -> int:
        """How many commands every worker here has finished."""
        words = self.signals.words
        return min([words[signals.line_of(rank) + signals.DONE] for rank in self.ranks])

    def over(self) -> int:
        """How many commands every worker here has finished or given up."""
        words, done, over = self.signals.words, signals.DONE, signals.OVER
        return min([max(words[line + done], words[line + over]) for line in map(signals.line_of, self.ranks)])

    def behind(self) -> int:
        """For how many commands to be finished by all workers the workers here wait; 0 where none has waited."""
        words = self.signals.words
        return max([words[signals.line_of(rank) + signals.BEHIND] for rank in self.ranks])

    def reports(self) -> int:
        """How many failures the workers here have reported, all together."""
        words = self.signals.words
        return sum([words[signals.line_of(rank) + signals.REPORTS] for rank in self.ranks])

    def marks(self) -> list[int]:
        """How far each worker here is: changes with each collective that it comes to."""
        words, told = self.signals.words, (signals.PROGRESS, signals.DONE, signals.SENT, signals.TOOK)
        return [words[line + at] for line in map(signals.line_of, self.ranks) for at in told]

    def link_messages(self) -> int:
        """The number of messages that the workers here have sent to peers on other hosts besides tensors and
        progress."""
        words = self.signals.words
        return sum([words[signals.line_of(rank) + signals.LINK_MESSAGES] for rank in self.ranks])

    def wait(self, commands: int, check: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        """Until every worker here, or each of `ranks`, has finished so many commands; `check` is called before each
        sleep, and raises to give up."""
        words = self.signals.words
        for rank in self.ranks if ranks is None else ranks:
            index = signals.line_of(rank) + signals.DONE
            if words[index] < commands:
                self.signals.wait(index, commands, check)

    def stop_steps(self, first: int, behind: int) -> None:
        """Have workers give up the steps from a command on, before another one, that have not passed their commit: at
        the next instruction those of processes of their own, and those of actors' processes at the next step."""
        words = self.signals.words
        if min(words[signals.line_of(rank) + signals.DONE] for rank in self.ranks) < words[signals.STOPPED]:
            first = min(first, words[signals.STOP_FROM])  # some were not given up yet when that was interrupted too
        self.signals.store(signals.STOP_FROM, first)
        self.signals.advance(signals.STOPPED, behind)
        for pid in list(self.pids.values()):
            stop(pid)

    def packets(self) -> Iterator[Packet]:
        """The workers' packets so far. A packet whose handling was interrupted comes again; its file is closed when the
        next one is asked for."""
        for rank, end in self.ends.items():
            inbox = self._inboxes[rank]
            with suppress(BlockingIOError, ConnectionError):
                while not inbox or inbox[-1][0]:  # an empty one is the end
                    # In one call, so that no signal's handler comes between a packet's leaving the socket and this.
                    inbox.extend(map(end.recvmsg, (wire.PACKET_BYTES,), _ROOM_FOR_A_FILE))
            while inbox and (packet := inbox[0])[0]:
                file = wire.LOST_FILE if packet[2] & socket.MSG_CTRUNC else -1
                for level, type_, data in packet[1]:
                    if level == socket.SOL_SOCKET and type_ == socket.SCM_RIGHTS:
                        (file,) = array("i", data)
                yield rank, packet[0], file
                done = inbox.popleft() if inbox and inbox[0] is packet else None
                if done is packet and file >= 0:
                    os.close(file)

    def sleep(self, ranks: Iterable[int], milliseconds: int) -> None:
        """Wait a little, at most until one of `ranks` sends something. Safe to call from any thread."""
        poll = select.poll()
        for rank in ranks:
            if rank in self.ends and (fd := self.ends[rank].fileno()) >= 0:  # closed by another thread
                poll.register(fd, select.POLLIN)
        poll.poll(milliseconds)

    def exits(self, seconds: float = 0.0) -> list[Exit]:
        """The workers that have ended, of those that were started last. Waits up to `seconds` for news where it knows
        of none."""
        inbox = self._processes.messages(self._number, 0.0 if self.reported else seconds)
        while inbox:
            self._note(message := inbox[0])  # where this is interrupted, it comes again
            drop(inbox, message)
        return list(self.reported.values())

    def _note(self, message: dict[str, Any]) -> None:
        rank = message.get("rank", -1)
        if message["is"] == "started":
            self.pids[rank] = message["pid"]
        elif message["is"] == "exited" and ("status" not in message or rank in self.pids):  # or else it is another's
            how = message["how"] if "how" in message else how_ended(message["status"])
            self.reported.setdefault(rank, Exit(rank, how, message.get("status"), message.get("log", "")))

    def missed(self) -> list[Exit]:
        """The workers that ended a while ago, though `exits` has not said so. Looks once a second at most."""
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + _MISSED_SECONDS
        before = self._ended
        self._ended = {rank for rank, pid in list(self.pids.items()) if state_of(pid) in ("", "Z")}
        return [Exit(rank, "has ended") for rank in sorted(before & self._ended)]

    def seen(self) -> dict[int, WorkerProgress]:
        """The activity of the workers here, by rank. Takes a second for each that does not answer, and some seconds at
        most."""
        words, found, deadline = self.signals.words, {}, time.monotonic() + _SEEN_SECONDS
        for rank, pid in list(self.pids.items()):
            line, state = signals.line_of(rank), state_of(pid)
            asked = state in ("R", "S", "D") and time.monotonic() < deadline
            stacks = where_is(pid) if asked else ""
            found[rank] = WorkerProgress(pid, words[line + signals.DONE], words[line + signals.PROGRESS], state, stacks)
        return found

    def memory(self) -> dict[int, int]:
        """The bytes of memory that the workers here hold, by rank, of those that have started."""
        return {rank: memory_of(pid) for rank, pid in sorted(self.pids.items())}

    def stopped(self) -> list[int]:
        """The workers here that a signal has stopped."""
        return [rank for rank, pid in list(self.pids.items()) if state_of(pid) == "T"]

    @property
    def lost_at_once(self) -> bool:
        """Whether the process that they were forked from has gone, and they with it."""
        return not self._processes.alive

    def mark_dead(self, rank: int) -> None:
        """Let the workers here know that one has died, here or elsewhere: those that wait give up."""
        self.window.mark_dead(rank)

    # -- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the workers, and wait until they are gone. Idempotent. In a forked child of the process that started them
        it only lets go of them."""
        if self._stop.alive:
            _stop(self._processes, self._number, self.ends, self._owner)
            self._stop.detach()  # not before: where Ctrl-C comes in between, they are ended when this is collected
            if os.getpid() != self._owner:
                return
            self._processes.wait_ended(self._number)
            geometry = self.window.geometry
            self.window.give_back(geometry.ring, geometry.total - geometry.ring)


def _not_started(workers: int, error: OSError) -> MonarchError:
    if isinstance(error, ConnectionError):
        what, hint = "the process that forks them has ended meanwhile", "Try again: a new one is started."
    else:
        what = str(error)
        hint = (
            "A limit is reached: on open files (ulimit -n), of which each worker takes one, processes (ulimit -u),\n"
            "the size of files (ulimit -f), which that of shared memory is too, or memory."
        )
    return MonarchError(f"cannot start {workers} workers: {what}", hint=hint)


def _stop(processes: Processes, number: int, ends: dict[int, socket.socket], owner: int) -> None:
    if os.getpid() == owner:
        processes.stop(number)
        for end in ends.values():  # of which forked children of this process may hold copies
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
    for end in ends.values():
        end.close()


_all: weakref.WeakSet[Workers] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child of this process: close the sockets of the workers, which are the parent's."""
    for workers in list(_all):
        workers.stop()


os.register_at_fork(after_in_child=_after_fork)


def _check_size(mesh: MeshSpec, here: int, geometry: Geometry) -> None:
    if not futex.supported():
        raise MonarchError("workers need Linux, on a processor whose futex call is known")
    most = WORKERS_PER_CORE * signals.cores()
    if here > most or here < 1:
        raise MonarchError(
            f"{mesh} has {here} workers{'' if here == mesh.workers else ' here'}, and this machine runs 1 to {most}",
            hint=f"it has {signals.cores()} cores, and at most {WORKERS_PER_CORE} workers a core make sense.\n"
            "To compile for a larger mesh without running, make it abstract.",
        )
    windows = geometry.total - STAGING_BYTES
    memory.require(windows + here * _WORKER_BYTES, f"{here} workers", memory.available_bytes)
