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
from typing import Any, Protocol

import torch

from monarch.compiler.config import spawned_with
from monarch.compiler.plan import MeshSpec
from monarch.runtime.collectives import Collectives, Network
from monarch.runtime.collectives.mirror import Mirror
from monarch.runtime.processes.looking import answer_with, stacks
from monarch.runtime.processes.roles import Forked
from monarch.runtime.shared import signals, wire
from monarch.runtime.shared.measured import clock
from monarch.runtime.shared.memory import new_file
from monarch.runtime.shared.results import Results
from monarch.runtime.shared.ring import RingReader
from monarch.runtime.shared.window import RING_BYTES, STAGING_BYTES, Window
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.state import Actors, Buffer, Count, Message, Value, WorkerState
from monarch.runtime.worker.tracing import Tracer


class Connect(Protocol):
    """Joins a worker to its counterparts on other hosts, over links that end with `end`; `over` says whether the mesh
    has ended meanwhile. Raises ControllerGone."""

    def __call__(
        self,
        mesh: MeshSpec,
        rank: int,
        window: Window,
        up: socket.socket,
        across: dict[str, Any],
        over: Callable[[], bool],
        end: ExitStack,
    ) -> Mirror: ...


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

    def run() -> None:
        status = 1
        try:
            torch.set_num_threads(forked.given["threads"])
            across = forked.given["across"]
            _loop(spec, rank, window, up, across, connect, lambda: os.getppid() != parent, ExitStack())
        except ControllerGone:
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    answer_with(stacks)
    threading.Thread(target=run, name=f"worker {rank}", daemon=True).start()
    threading.Event().wait()


def serve_beside(
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

    def over() -> bool:
        return bool(window.words[signals.DEAD]) or bool(poll.poll(0))

    with closing(up), ExitStack() as end, suppress(ControllerGone):
        _loop(mesh, rank, window, up, across, connect, over, end, actors)


class ControllerGone(Exception):
    """The mesh has ended: the worker has nobody to work for."""


def _loop(
    mesh: MeshSpec,
    rank: int,
    window: Window,
    up: socket.socket,
    across: dict[str, Any] | None,
    connect: Connect | None,
    over: Callable[[], bool],
    end: ExitStack,
    actors: Actors | None = None,
) -> None:
    geometry = window.geometry
    mirror, network = None, None
    if across is not None:
        assert connect is not None  # the roles of workers on several hosts are in `peers`
        mirror = connect(mesh, rank, window, up, across, over, end)
        network = Network(across["bind"], across["advertise"], across["tls"] is not None)
    collectives = Collectives(mesh, rank, window, mirror, network)
    marks = collectives.signals
    ring = RingReader(window.bytes[geometry.ring : geometry.ring + RING_BYTES], marks)
    staging = window.view(geometry.staging, (STAGING_BYTES,), torch.uint8)

    def tracer(words: int) -> Tracer | None:
        if not words:
            collectives.time_no_waits()
            return None
        fd = new_file("monarch-trace", 8 * words)
        try:
            memory = mmap(fd, 8 * words)
        except BaseException:
            os.close(fd)
            raise
        return Tracer(memoryview(memory).cast("q"), clock, collectives.time_waits(clock), fd)

    state = WorkerState(
        mesh,
        rank,
        collectives,
        lambda offset, size: staging[offset : offset + size],
        tracer,
        lambda number: _receive_file(up, number),
        actors,
        Results(window) if rank == 0 and across is None else None,
    )
    line = signals.line_of(rank)
    reports = 0

    def idle(seen: int) -> None:
        if over():
            raise ControllerGone

    step = 0
    with torch.inference_mode(), closing(collectives):
        while True:
            body = ring.read(idle)
            for message in state.handle(step, body):
                if isinstance(_send(up, rank, message), Report):
                    reports += 1
                    window.words[line + signals.REPORTS] = reports
                    if wire.KIND.unpack_from(body)[0] == wire.RUN:
                        collectives.fail(step)
            step += 1
            if mirror is not None:
                window.words[line + signals.LINK_MESSAGES] = mirror.messages
            marks.store(line + signals.DONE, step)


def _send(up: socket.socket, rank: int, message: Message) -> Message:
    """Send the message, or a report of why it cannot be; gives what was sent."""
    try:
        if isinstance(message, Value):
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


def _send_value(up: socket.socket, value: Value) -> None:
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
