"""A worker: reads commands, carries them out, says how far it is. In a process of its own, or in one of actors."""

from __future__ import annotations

import gc
import os
import select
import socket
import threading
import traceback
from array import array
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from mmap import mmap
from typing import TYPE_CHECKING, Any, Protocol

import torch

from monarch.compiler.config import spawned_with
from monarch.compiler.plan import MeshSpec
from monarch.runtime.collectives import Collectives, Meetings
from monarch.runtime.processes.looking import answer_with, listen_to_stops, stacks
from monarch.runtime.processes.roles import Forked
from monarch.runtime.shared import signals, wire
from monarch.runtime.shared.measured import clock
from monarch.runtime.shared.memory import new_file
from monarch.runtime.shared.results import Results
from monarch.runtime.shared.ring import RingReader
from monarch.runtime.shared.window import RING_BYTES, STAGING_BYTES, Window
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.exchange import Actors
from monarch.runtime.worker.messages import Buffer, Count, Fetched, Message
from monarch.runtime.worker.state import WorkerState
from monarch.runtime.worker.tracing import Tracer

if TYPE_CHECKING:  # workers on one host need neither
    from monarch.runtime.collectives.listening import Network
    from monarch.runtime.collectives.mirror import Mirror


class Connect(Protocol):
    """Joins a worker to its counterparts on other hosts, over links that end with `end`, and says where its process
    groups may listen; `check` raises where the session has ended meanwhile."""

    def __call__(
        self,
        mesh: MeshSpec,
        rank: int,
        window: Window,
        up: socket.socket,
        across: dict[str, Any],
        check: Callable[[], None],
        end: ExitStack,
    ) -> tuple[Mirror, Network]: ...


def serve(forked: Forked, connect: Connect | None = None) -> None:
    """Work until killed: a worker has nothing that it would have to put away. Does not return. The role
    `processes.roles.WORKER`.

    The work is done in a thread of its own. OpenMP keeps its pool of threads for each thread that starts parallel work;
    the one that this process inherited by fork is the parent's, whose other threads do not exist here, and using it
    would wait for them for ever.
    """
    assert forked.window is not None
    rank, window, up = forked.rank, forked.window, socket.socket(fileno=forked.files[0])
    spec = MeshSpec(tuple((name, size) for name, size in forked.given["dims"]))
    spawned_with(forked.given["settings"])
    gc.freeze()  # what the parent made is never garbage, and looking at it would copy its pages
    parent = os.getppid()

    def check() -> None:
        if os.getppid() != parent:
            raise ControllerGone
        if window.words[signals.DEAD]:
            raise SessionOver

    def run() -> None:
        status = 1
        try:
            torch.set_num_threads(forked.given["threads"])
            worker = _Worker(spec, rank, window, up, forked.given["across"], connect, check)
            first = forked.given["first"]
            while True:
                worker.session(first)
                first = worker.between()
        except ControllerGone:
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    answer_with(stacks)
    listen_to_stops()
    threading.Thread(target=run, name=f"worker {rank}", daemon=True).start()
    threading.Event().wait()


def serve_in_actors(
    actors: Actors,
    mesh: MeshSpec,
    rank: int,
    window: Window,
    up: socket.socket,
    across: dict[str, Any] | None,
    connect: Connect | None = None,
) -> None:
    """Work in this thread, in a process that does other things too, until the mesh is closed or lost. The role
    `processes.roles.WORKER_BESIDE_ACTORS`.

    How many threads ops compute with is the process' own affair, and modes of torch's are a thread's. Raises what a
    worker process would end of.
    """
    poll = select.poll()
    poll.register(up, 0)  # is told only of a closed end

    def check() -> None:
        if window.words[signals.DEAD] or poll.poll(0):
            raise ControllerGone

    with closing(up), suppress(ControllerGone):
        _Worker(mesh, rank, window, up, across, connect, check, actors).session(0)


class ControllerGone(Exception):
    """The mesh has ended: the worker has nobody to work for."""


class SessionOver(Exception):
    """A worker of the mesh has died: the others keep their values, and wait for a session without it."""


class _Worker:
    """A worker and its sessions. `check` raises what ends one."""

    def __init__(
        self,
        mesh: MeshSpec,
        rank: int,
        window: Window,
        up: socket.socket,
        across: dict[str, Any] | None,
        connect: Connect | None,
        check: Callable[[], None],
        actors: Actors | None = None,
    ) -> None:
        self._mesh, self._rank, self._window, self._up = mesh, rank, window, up
        self._across, self._connect, self._check = across, connect, check
        geometry = window.geometry
        staging = window.view(geometry.staging, (STAGING_BYTES,), torch.uint8)
        self._meetings = Meetings(mesh, rank, window)
        self._state = WorkerState(
            mesh,
            rank,
            Collectives(self._meetings, mesh),
            lambda offset, size: staging[offset : offset + size],
            self._tracer,
            lambda number: _receive_file(up, number),
            actors,
            Results.at(window, rank),
        )
        self._finished = 0  # commands

    def session(self, first: int) -> None:
        """Carry out commands, of which the first has this number, until a worker of the mesh dies."""
        rank, window = self._rank, self._window
        with torch.inference_mode(), ExitStack() as end, suppress(SessionOver):
            self._finished = first
            mirror, network = None, None
            if self._across is not None:
                assert self._connect is not None  # the roles of workers on several hosts are in `peers`
                across, check = self._across, self._check
                mirror, network = self._connect(self._mesh, rank, window, self._up, across, check, end)
            self._meetings = meetings = Meetings(self._mesh, rank, window, mirror)
            meetings.verdict = self._verdict
            end.callback(self._state.close)
            self._state.renew(Collectives(meetings, self._mesh, network=network))
            self._work(meetings, mirror)

    def _work(self, meetings: Meetings, mirror: Mirror | None) -> None:
        window, up, rank, state = self._window, self._up, self._rank, self._state
        words, line, marks, step, reports = window.words, signals.line_of(rank), meetings.signals, self._finished, 0
        geometry, check = window.geometry, self._check
        ring = RingReader(window.bytes[geometry.ring : geometry.ring + RING_BYTES], marks)

        def idle(seen: int) -> None:
            check()
            state.let_go()

        while True:
            body = ring.read(idle)
            if words[signals.DEAD]:
                check()
            for message in state.handle(step, body):
                if isinstance(_send(up, rank, message), Report):
                    reports += 1
                    words[line + signals.REPORTS] = reports
                    if wire.KIND.unpack_from(body)[0] in _MEETING:
                        meetings.fail(step, state.peers(body))
                        if words[signals.DEAD]:  # the command is not finished
                            check()
            self._finished = step = step + 1
            if mirror is not None:
                words[line + signals.LINK_MESSAGES] = mirror.messages
            marks.store(line + signals.DONE, step)

    def _tracer(self, words: int) -> Tracer | None:
        meetings = self._meetings
        if not words:
            meetings.time_no_waits()
            return None
        fd = new_file("monarch-trace", 8 * words)
        try:
            memory = mmap(fd, 8 * words)
        except BaseException:
            os.close(fd)
            raise
        return Tracer(memoryview(memory).cast("q"), clock, meetings.time_waits(clock), fd)

    # -- when another worker has died --------------------------------------------------------------------------------

    def _verdict(self, step: int) -> bool:
        """Whether others have passed the commit of a step at which this worker waited when another died."""
        if self._state.beside_actors:  # there is no next session
            return False
        self._tell(wire.DOUBT, step)
        while True:
            kind, *rest = self._next_packet()
            if kind == wire.VERDICT and rest[0] == step:
                return bool(rest[1])

    def between(self) -> int:
        """Wait for the next session, and answer meanwhile for the values that are here. Gives the number of the
        session's first command. Raises ControllerGone."""
        self._state.take_back()
        self._tell(wire.ENDED, self._finished)
        while True:
            kind, *rest = self._next_packet()
            if kind == wire.SESSION:
                return rest[0]
            messages: list[Message] = []
            if kind == wire.HOW_FAR:
                self._tell(wire.ENDED, self._finished)
            elif kind == wire.ASK:
                number, handle = rest
                messages = self._state.handle(number, bytearray(wire.numbers(wire.FETCH, handle, self._rank)))
            elif kind == wire.TABLE:
                messages = [self._state.table(rest[0])]
            for message in messages:
                _send(self._up, self._rank, message)

    def _tell(self, kind: int, number: int) -> None:
        try:
            self._up.send(wire.UP_HEAD.pack(kind, number))
        except ConnectionError:
            raise ControllerGone from None

    def _next_packet(self) -> tuple[int, ...]:
        """The next packet. Plans that were handed over and not loaded are let go."""
        packet, files, _, _ = socket.recv_fds(self._up, wire.PACKET_BYTES, 1)
        for file in files:
            os.close(file)
        if not packet:
            raise ControllerGone
        return wire.unpack_numbers(packet) if len(packet) % 8 == 0 else (0,)  # or else it is of the last start


_MEETING = (wire.RUN, wire.COPY, wire.SEND, wire.GIVE)
"""Commands in which workers wait for each other."""


def _send(up: socket.socket, rank: int, message: Message) -> Message:
    """Send the message, or a report of why it cannot be; gives what was sent."""
    try:
        if isinstance(message, Fetched):
            try:
                _send_value(up, message)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    raise
                message = Report("failed", rank, message.step, f"sending a value to the controller: {error}")
        if isinstance(message, Report):
            up.send(message.encode())
        elif isinstance(message, Buffer):
            _send_file(up, wire.buffer_head(message.step, len(message.tracer.memory)), message.tracer.fd)
        elif isinstance(message, Count):
            up.send(wire.UP_HEAD.pack(wire.COUNTED, message.step) + wire.KIND.pack(message.values))
    except ConnectionError:
        raise ControllerGone from None
    return message


def _send_value(up: socket.socket, value: Fetched) -> None:
    """A small tensor goes through the socket. A large one is written to an anonymous file, which the controller then
    maps as the tensor that it hands out: one copy, whatever the size."""
    row = wire.raw(value.tensor)
    if row.numel() <= wire.INLINE_BYTES:
        up.send(wire.value_head(wire.VALUE, value.step, value.tensor) + row.numpy().tobytes())
        return
    fd = os.memfd_create("monarch-value", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, row.numel())
        data = memoryview(row.numpy())  # type: ignore[arg-type]
        while data:
            data = data[os.write(fd, data) :]
    except BaseException:
        os.close(fd)
        raise
    _send_file(up, wire.value_head(wire.VALUE_FILE, value.step, value.tensor), fd)


def _receive_file(up: socket.socket, number: int) -> bytes:
    """The plan `number`. Plans that were handed over before it, and never commanded to be loaded, are passed over."""
    while True:
        packet, files, _, _ = socket.recv_fds(up, wire.PACKET_BYTES, 1)
        if not packet:
            raise ControllerGone
        try:  # read by position: the file's own is shared by all workers
            if wire.unpack_numbers(packet) != (wire.LOAD, number):
                continue
            size = os.fstat(files[0]).st_size
            blob = bytearray()
            while len(blob) < size:
                blob += os.pread(files[0], size - len(blob), len(blob))
            return bytes(blob)
        finally:
            os.close(files[0])


def _send_file(up: socket.socket, head: bytes, fd: int) -> None:
    """Send a file with its head, and close it here."""
    try:
        up.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))])
    finally:
        os.close(fd)
