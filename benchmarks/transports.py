"""64 MiB from one process's memory into another's over each transport, and a signal's way there and back.

Bandwidth against what the machine can do: shared memory against one memcpy of the same bytes within this process, TCP
against a plain Python socket copy (`sendall` of all bytes in one process, `recv_into` the target in the other, one byte
back when all are there). Everything is touched before it is timed. The other process is a fork of this one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.measure import Row, interleaved, seconds
from monarch.runtime import rdma
from monarch.runtime.shared import futex
from monarch.runtime.transport import reach
from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.interface import Link, Region, Signal

SIZE = 64 << 20
REPETITIONS = 15
ROUNDS = 2000
MEMCPY = 1 / 0.6
SOCKET = 1 / 0.8
SECRET = b"a secret for a benchmark alone."


class Block:
    """Touched memory: in a file, or a tensor."""

    def __init__(self, size: int, file: bool) -> None:
        self.file = os.memfd_create("benchmark") if file else None
        if self.file is not None:
            os.ftruncate(self.file, size)
            self.view = memoryview(mmap.mmap(self.file, size))
        else:
            self.view = torch.zeros(size, dtype=torch.uint8).numpy().data
        ctypes.memset(self.address(), 1, size)

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))


def serve(pipe: Connection, file: bool) -> None:
    """The other process: registers memory, and answers signals."""
    torch.set_num_threads(1)
    block = Block(SIZE, file)
    joined = threading.Event()
    with Endpoint(SECRET, transports=("shm", "tcp"), joined=lambda link: joined.set()) as endpoint:
        registration = endpoint.register(block.view, file=block.file)
        # A buffer's file is that of a tensor in shared memory.
        tensor = torch.ones(SIZE, dtype=torch.uint8)
        buffer = rdma.RDMABuffer(tensor.share_memory_() if file else tensor)
        pipe.send((endpoint.address, registration.region, buffer))
        while (asked := pipe.recv()) is not None:
            back, values = asked
            joined.wait()  # the dialer has it a moment earlier
            link, words = endpoint.links[-1], block.view[:8].cast("q")
            for value in values:
                sleep_until(words, block.address(), value)
                link.post(b"", back, 0, Signal(back, 0, value))


def sleep_until(words: memoryview, address: int, value: int) -> None:
    while (seen := words[0]) != value:
        futex.wait(address, seen, 1.0)


@contextmanager
def other(serving: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A forked process that runs `serving(pipe, *arguments)`."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=serving, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.send(None)
    process.join()


def receive_all(pipe: Connection) -> None:
    """The plain socket copy's other end."""
    target = Block(SIZE, file=False).view
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        sock, _ = server.accept()
    with sock:
        while True:
            at = 0
            while at < SIZE:
                size = sock.recv_into(target[at:])
                if not size:
                    return
                at += size
            sock.sendall(b"x")


@contextmanager
def plain_socket(source: memoryview) -> Iterator[Callable[[], float]]:
    with other(receive_all) as pipe, socket.create_connection(pipe.recv()) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def copy() -> float:
            start = time.perf_counter()
            sock.sendall(source)
            assert sock.recv(1) == b"x"
            return time.perf_counter() - start

        yield copy
        sock.shutdown(socket.SHUT_WR)


def bandwidth() -> Iterator[Row]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        source, copied = Block(SIZE, file=False), Block(SIZE, file=False)
        tensor = torch.frombuffer(source.view, dtype=torch.float32)

        def memcpy() -> float:
            return seconds(lambda: ctypes.memmove(copied.address(), source.address(), SIZE))

        def row(name: str, ours: Callable[[], Any], theirs: Callable[[], float], against: str, target: float) -> Row:
            times, others = interleaved(lambda: seconds(ours), theirs, REPETITIONS, warm=3)
            return Row(name, times, others, against, target, f"{SIZE / 2**30 / statistics.median(times):.1f} GiB/s")

        def pair(name: str, link: Link, region: Region, *against: Any) -> Iterator[Row]:
            yield row(f"{name}, put", lambda: link.put(source.view, region).wait(), *against)
            yield row(f"{name}, get", lambda: link.get(source.view, region).wait(), *against)

        for file in (True, False):
            address, region, buffer = stack.enter_context(other(serve, file)).recv()
            shm = stack.enter_context(Endpoint(SECRET, transports=("shm",))).connect(address)
            yield from pair(f"shm, {'a file' if file else 'process_vm'}", shm, region, memcpy, "memcpy", MEMCPY)
            read = functools.partial(read_into, buffer, tensor)
            yield row(f"RDMABuffer.read_into, {'shared' if file else 'other'} memory", read, memcpy, "memcpy", MEMCPY)

        sockets = stack.enter_context(plain_socket(source.view))
        tcp = stack.enter_context(Endpoint(SECRET, transports=("tcp",))).connect(address)
        yield from pair("tcp", tcp, region, sockets, "a socket copy", SOCKET)
        stack.enter_context(only_tcp())
        yield row("RDMABuffer.read_into, tcp", read, sockets, "a socket copy", SOCKET)


def read_into(buffer: rdma.RDMABuffer, tensor: torch.Tensor) -> None:
    buffer.read_into(tensor).get()


@contextmanager
def only_tcp() -> Iterator[None]:
    """Within the block buffers are reached over TCP."""
    before = rdma._process, reach._made
    rdma._process = reach._made = None
    rdma.configure(transports=("tcp",))
    yield
    rdma.endpoint().close()
    rdma._process, reach._made = before
    reach._options.clear()


# -- latency -----------------------------------------------------------------------------------------------------------


def bounce(pipe: Connection, inherited: socket.socket, sock: socket.socket) -> None:
    """A bare socketpair's other end."""
    inherited.close()
    while data := sock.recv(64):
        sock.sendall(data)


def latency() -> Iterator[Row]:
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(other(bounce, ours, theirs))
        theirs.close()
        stack.callback(ours.close)

        def socketpair() -> float:
            return seconds(lambda: (ours.sendall(b"x"), ours.recv(64)), ROUNDS)

        for name, transport, file in (("shm, a file", "shm", True), ("tcp", "tcp", False)):
            with other(serve, file) as pipe, Endpoint(SECRET, transports=(transport,)) as endpoint:
                address, region, _ = pipe.recv()
                yield from signals(name, pipe, endpoint.connect(address), endpoint, region, file, socketpair)


def signals(
    name: str,
    pipe: Connection,
    link: Link,
    endpoint: Endpoint,
    region: Region,
    file: bool,
    socketpair: Callable[[], float],
) -> Iterator[Row]:
    block = Block(4096, file)
    back = endpoint.register(block.view, file=block.file).region
    words, address = block.view[:8].cast("q"), block.address()
    values = itertools.count(1 << 32, ROUNDS)

    def there_and_back() -> float:
        first = next(values)
        pipe.send((back, range(first, first + ROUNDS)))
        start = time.perf_counter()
        for value in range(first, first + ROUNDS):
            link.post(b"", region, 0, Signal(region, 0, value))
            sleep_until(words, address, value)
        return (time.perf_counter() - start) / ROUNDS

    times, others = interleaved(there_and_back, socketpair, 7)
    payload = memoryview(bytes(4096))
    posts = [seconds(lambda: link.post(payload, region, 4096, Signal(region, 8, 1)), 100) for _ in range(21)]
    note = f"{statistics.median(posts) * 1e6:.1f} µs for a post of 4 KiB to return"
    yield Row(f"signal there and back, {name}", times, others, "a byte over a socketpair", None, note)


def rows() -> list[Row]:
    return [*bandwidth(), *latency()]


if __name__ == "__main__":
    from benchmarks.measure import table

    print(table(rows()))
