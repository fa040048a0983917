"""The speed of the transports between two processes of this machine, each measured by itself."""

from __future__ import annotations

import mmap
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection

import torch

from monarch.compiler.plan import MonarchError
from monarch.runtime.hosts.doctor.facts import Measured
from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.interface import Address, Link, Region, Work
from monarch.runtime.transport.plug import TRANSPORTS

SIZE = 64 << 20
ROUNDS, SECONDS = 5, 0.4
"""Of a measurement: so many rounds, or as many as are done in so many seconds, at least one."""
PATIENCE = 10.0
"""The bound, in seconds, of a step that takes far less than one."""


def measure_transports(names: Sequence[str] = tuple(TRANSPORTS), size: int = SIZE) -> tuple[Measured, ...]:
    """Write to and read from memory of a second process, over each transport in turn. To be called before this process
    has threads, or uses a GPU: it forks."""
    secret = secrets.token_bytes(32)
    with _partner(secret, size) as pipe:
        return tuple(_measured(name, pipe, secret, size) for name in names)


def measure_copy(size: int = SIZE) -> float:
    """Bytes a second of a plain copy from memory to memory, in this process."""
    source, target = memoryview(mmap.mmap(-1, size)), memoryview(mmap.mmap(-1, size))

    def copy() -> None:
        target[:] = source

    copy()  # which takes the memory's pages from the kernel
    return size / _seconds(copy)


def _measured(name: str, pipe: Connection, secret: bytes, size: int) -> Measured:
    with suppress(BrokenPipeError):  # it has ended: said below
        pipe.send(name)
    if not pipe.poll(PATIENCE):
        return Measured(name, missing=f"the other process did not answer within {PATIENCE:.0f} s")
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionResetError):
        return Measured(name, missing="the other process ended")
    if isinstance(answer, str):
        return Measured(name, missing=answer)
    address, region = Address.from_json(answer[0]), Region.from_json(answer[1])
    try:
        with closing(Endpoint(secret, transports=[name])) as endpoint:
            link = endpoint.connect(address, timeout=PATIENCE)
            return _both_ways(name, link, region, size)
    except MonarchError as error:
        return Measured(name, missing=str(error))
    except TimeoutError:
        return Measured(name, missing=f"{size >> 20} MiB did not arrive within {PATIENCE:.0f} s")


def _both_ways(name: str, link: Link, region: Region, size: int) -> Measured:
    here, back = _memory(name, size).fill_(7), _memory(name, size)

    def finish(work: Work) -> None:
        work.wait(PATIENCE)

    finish(link.put(here, region))
    write = _seconds(lambda: finish(link.put(here, region)))
    finish(link.get(back, region))
    read = _seconds(lambda: finish(link.get(back, region)))
    if not torch.equal(here, back):
        return Measured(name, missing="the bytes read back differ from those written: please report this")
    return Measured(name, size / write, size / read)


def _memory(name: str, size: int) -> torch.Tensor:
    """Memory of the kind that a transport is for."""
    return torch.zeros(size, dtype=torch.uint8, device="cuda" if name == "cuda" else "cpu")


def _seconds(call: Callable[[], object]) -> float:
    """The least of a few rounds: other processes can only make a round longer."""
    found: list[float] = []
    while len(found) < ROUNDS and sum(found) < SECONDS:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


@contextmanager
def _partner(secret: bytes, size: int) -> Iterator[Connection]:
    """The other process. It is asked for a transport by name, and answers with an address and a region (as JSON), or
    with text: why it has none."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=serve, args=(here, there, secret, size), daemon=True)
    process.start()
    there.close()
    try:
        with here:
            yield here
    finally:
        process.kill()
        process.join()


def serve(theirs: Connection, pipe: Connection, secret: bytes, size: int) -> None:
    theirs.close()
    endpoints = []
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        endpoint = Endpoint(secret, transports=[name])
        endpoints.append(endpoint)
        if missing := endpoint.transports[name]:
            pipe.send(missing)
            continue
        try:
            region = endpoint.register(_memory(name, size)).region
        except MonarchError as error:
            pipe.send(str(error))
        else:
            pipe.send((endpoint.address.to_json(), region.to_json()))
