"""Memory of one process that others read and write directly: `RDMABuffer`. Public as `monarch.rdma`.

    # in the process that has the memory                    # in any other
    weights = torch.randn(1024, 1024)
    buffer = RDMABuffer(weights)        ── pickled ──▶      copy = torch.empty(1024, 1024)
                                                            buffer.read_into(copy).get()

Each process has one endpoint (see `transport.endpoint`), made when it is first needed, and anew after a fork; and one
link to each process whose buffers it uses, over the best transport that joins the two.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from monarch.compiler.plan import MonarchError
from monarch.runtime.future import Future
from monarch.runtime.transport import buffers, reach
from monarch.runtime.transport.cuda import driver, staging
from monarch.runtime.transport.endpoint import Endpoint, Registration
from monarch.runtime.transport.interface import AccessRefused, Address, LinkLost, Memory, Region, Work
from monarch.runtime.transport.reach import configure
from monarch.runtime.transport.stream import StreamLink

__all__ = [
    "RDMAAction",
    "RDMABuffer",
    "Transfer",
    "configure",
    "endpoint",
    "get_rdma_backend",
    "is_ibverbs_available",
]

_WORD = 8
_CONNECTING = 10.0

Value = TypeVar("Value")


# -- this process ------------------------------------------------------------------------------------------------------


@dataclass
class _Process:
    """This process's endpoints and links, for all buffers together."""

    endpoint: Endpoint
    secret: bytes
    links: dict[str, StreamLink] = field(default_factory=dict)
    shared: dict[int, Registration] = field(default_factory=dict)
    """Buffers that were pickled: somebody may use them until they are dropped."""
    locks: dict[str, threading.Lock] = field(default_factory=dict)
    helpers: ThreadPoolExecutor | None = None

    def link(self, address: Address, secret: bytes) -> StreamLink:
        """The link to a process; made where there is none."""
        link = self.links.get(address.process)
        if link is not None and link.error is None:
            return link
        # One at a time for each process, and not for all: one that does not answer keeps nobody else waiting.
        with self.locks.setdefault(address.process, threading.Lock()):
            link = self.links.get(address.process)
            if link is None or link.error is not None:
                try:
                    link = self.links[address.process] = self.endpoint.connect(address, secret, _CONNECTING)
                except MonarchError as error:
                    raise LinkLost(error.message, hint=error.hint) from error
            return link

    def helper(self) -> ThreadPoolExecutor:
        if self.helpers is None:
            self.helpers = ThreadPoolExecutor(4, "monarch-rdma")
        return self.helpers


_process: _Process | None = None


def endpoint() -> Endpoint:
    """This process's endpoint."""
    return _here().endpoint


def is_ibverbs_available() -> bool:
    """Whether this process can reach others over InfiniBand verbs: it has the library, and a device with an active
    port. Makes this process's endpoint, so that `configure` has to come first."""
    return endpoint().transports.get("verbs") == ""


def get_rdma_backend() -> Literal["ibverbs", "tcp"]:
    """The transport of buffers between hosts: "ibverbs" where `is_ibverbs_available()`, else "tcp". Processes on one
    host share memory either way; `RDMABuffer.backend` is the transport of one buffer's bytes."""
    return "ibverbs" if is_ibverbs_available() else "tcp"


def _here() -> _Process:
    global _process
    found = _process
    if found is None:
        with reach.lock:
            found = _process
            if found is None:
                secret = secrets.token_bytes(32)
                found = _process = _Process(reach.make(partial(Endpoint, secret)), secret)
    return found


def close() -> None:
    """Close this process's endpoint, if it has one, and forget how it was configured. Buffers that were made before
    cannot be reached any more; the next one has an endpoint of its own."""
    global _process
    with reach.lock:
        if _process is not None:
            _process.endpoint.close()
        _process = None
        reach.forget()


def _after_fork() -> None:
    global _process
    _process = None


os.register_at_fork(after_in_child=_after_fork)


# -- transfers under way ----------------------------------------------------------------------------------------------


class Transfer(Future[Value]):
    """A `Future` that waits no longer than the transfer's timeout in seconds, from its start. One that has taken longer
    may still be under way: its memory should not be used for anything else before `done()`."""

    __slots__ = ("_deadline", "_patience")

    def __init__(self, timeout: float | None) -> None:
        self._begin()
        self._patience = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def get(self, timeout: float | None = None) -> Value:
        """Wait for the end, at most `timeout` seconds if there is one: TimeoutError then."""
        if timeout is None and self._deadline is not None:
            timeout = max(0.0, self._deadline - time.monotonic())
        try:
            return super().get(timeout)
        except TimeoutError:
            if self.done():
                raise
            raise TimeoutError(f"the transfer has not finished within {self._patience or timeout:g} s") from None

    def __await__(self) -> Generator[Any, None, Value]:
        return self._awaited().__await__()

    async def _awaited(self) -> Value:
        if self.done():
            await asyncio.sleep(0)  # a thread that waits for one after the other lets others run all the same
            return self.get()
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            return await asyncio.wait_for(self.as_asyncio(), left)
        except TimeoutError:
            if self.done():
                return self.get()
            raise TimeoutError(f"the transfer has not finished within {self._patience:g} s") from None


class _Start(NamedTuple):
    """How a transfer is begun."""

    begin: Callable[[], Work]
    at_once: Callable[[], Work | None] | None = None
    """The whole of it, where that takes no longer than to hand it to another thread; None where it would."""


def _begin(start: _Start, timeout: float | None) -> Transfer[int | None]:
    """Begin some work, and give its future. Begins on another thread where this one runs an event loop, which making a
    link, or copying much in shared memory, would stop."""
    transfer: Transfer[int | None] = Transfer(timeout)

    def begin(how: Callable[[], Work | None] = start.begin) -> None:
        try:
            work = how()
        except Exception as error:
            transfer.fail(error)
        else:
            if work is not None:
                work.then(lambda: transfer.resolve(work.wait))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        begin()
    else:
        if start.at_once is not None:
            begin(start.at_once)
        if not transfer.done():
            _here().helper().submit(driver.as_if_here(begin))
    return transfer


class _Done:
    """A `Work` that is over."""

    def __init__(self, value: int | None = None) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def then(self, call: Callable[[], None]) -> None:
        call()

    def wait(self, timeout: float | None = None, check: Callable[[], None] | None = None) -> int | None:
        return self._value


# -- buffers -----------------------------------------------------------------------------------------------------------


class RDMABuffer:
    """Memory of this process, a contiguous tensor of any dtype or a contiguous buffer, for other processes to use.

    Small, and can be pickled: the pickle holds where the process is, the memory's key, and the process's secret.
    **Who gets the pickle may read and write the memory, and connect to the process**: send it over trusted ways only.
    It works in any process, also in the one that has the memory.

    The memory stays registered, and alive, until `drop()`; a buffer that was never pickled, until it is collected, too.
    Its bytes are used as they are at the moment: nothing orders a transfer with what its owner does meanwhile.
    A tensor's memory must stay where it is until then: `share_memory_()`, queues of `torch.multiprocessing` and
    `resize_` move it, and others' writes go to its former place. Call `share_memory_()` before the buffer is made.
    """

    __slots__ = ("__weakref__", "_address", "_region", "_registration", "_secret")

    def __init__(self, memory: Memory) -> None:
        here = _here()
        registration = here.endpoint.register(memory)
        self._fill(here.endpoint.address, registration.region, here.secret, registration)
        weakref.finalize(self, _collected, here, registration).atexit = False

    def _fill(self, address: Address, region: Region, secret: bytes, registration: Registration | None) -> None:
        self._address = address
        self._region = region
        self._secret = secret
        self._registration = registration

    def __reduce__(self) -> tuple[Any, ...]:
        if self._registration is not None and self._is_here():
            _here().shared[self._region.number] = self._registration
        return _unpickle, (self._address.to_json(), self._region.to_json(), self._secret)

    def __repr__(self) -> str:
        where = "this process" if self._is_here() else f"process {self._address.process[:8]}"
        return f"<RDMABuffer of {self.size():,} bytes in {where}>"

    def _is_here(self) -> bool:
        return _here().endpoint.address.process == self._address.process

    # -- properties --------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Bytes."""
        return self._region.size

    @property
    def owner(self) -> str:
        """The process that has the memory: 32 hex digits."""
        return self._address.process

    @property
    def backend(self) -> str:
        """How this process reaches the memory: "local", or the link's transport. Makes the link where there is none."""
        return "local" if self._is_here() else self._link().transport

    def _link(self) -> StreamLink:
        return _here().link(self._address, self._secret)

    # -- transfers -------------------------------------------------------------------------------------------------

    def read_into(self, dst: Memory, *, offset: int | None = None, timeout: float | None = 3) -> Transfer[None]:
        """Copy the whole buffer to the beginning of `dst`, which has at least its size. With `offset`: fill all of
        `dst` from that byte on.

        A transfer that fails raises where it is waited for: AccessRefused where the buffer was dropped, LinkLost where
        its process is gone, TimeoutError after `timeout` seconds. Sizes that do not fit, and memory that is not
        contiguous, raise MonarchError here.
        """
        return _nothing(_begin(self._reading(dst, offset), timeout))

    def write_from(self, src: Memory, *, offset: int | None = None, timeout: float | None = 3) -> Transfer[None]:
        """Copy all of `src` to the beginning of the buffer, or to byte `offset`. `src` must not change before the end.
        Errors as with `read_into`."""
        return _nothing(_begin(self._writing(src, offset), timeout))

    def fetch_add(self, offset: int, value: int, *, timeout: float | None = 3) -> Transfer[int]:
        """Add to the signed 8-byte word at byte `offset`; gives the old word. Atomic with all other such actions."""
        return _number(_begin(_Start(self._adding(offset, value)), timeout))

    def compare_swap(self, offset: int, expected: int, desired: int, *, timeout: float | None = 3) -> Transfer[int]:
        """Store `desired` in the word at byte `offset` if it is `expected`; gives the old word."""
        return _number(_begin(_Start(self._swapping(offset, expected, desired)), timeout))

    def drop(self) -> Transfer[None]:
        """Take the memory back, in the process that has it: when this is done nobody else uses it any more. Dropping
        twice does nothing. MonarchError in another process."""
        if not self._is_here():
            raise MonarchError(
                f"this buffer's memory is in process {self._address.process[:8]}, which alone can drop it",
                hint="Call drop() there.",
            )
        registration = self._registration or _here().shared.get(self._region.number)

        def drop() -> Work:
            if registration is not None:
                registration.drop()
                _here().shared.pop(self._region.number, None)
            return _Done()

        return _nothing(_begin(_Start(drop), None))

    # -- how each is begun: all that can be checked is checked first -----------------------------------------------

    def _reading(self, dst: Memory, offset: int | None) -> _Start:
        room = buffers.size_of(dst)
        if offset is None and room > self.size():
            dst = _beginning(dst, self.size())
        elif offset is None and room < self.size():
            raise MonarchError(
                f"the buffer has {self.size():,} bytes, and there is room for {room:,}",
                hint="To read a part of it, say where it begins: offset=0.",
            )
        self._check(offset or 0, min(room, self.size()) if offset is None else room)
        if not self._is_here():
            _checked(dst, writable=True)
            return _Start(lambda: self._link().get(dst, self._region, offset or 0), self._at_once(dst, offset, "get"))
        target = buffers.range_of(dst, writable=True)

        def read() -> Work:
            staging.move(target, _here().endpoint.memory(self._region, offset or 0, target.size, write=False))
            return _Done()

        return _Start(read)

    def _writing(self, src: Memory, offset: int | None) -> _Start:
        self._check(offset or 0, buffers.size_of(src))
        if not self._is_here():
            _checked(src, writable=False)
            return _Start(lambda: self._link().put(src, self._region, offset or 0), self._at_once(src, offset, "put"))
        source = buffers.range_of(src)

        def write() -> Work:
            staging.move(_here().endpoint.memory(self._region, offset or 0, source.size, write=True), source)
            return _Done()

        return _Start(write)

    def _at_once(self, memory: Memory, offset: int | None, what: Literal["get", "put"]) -> Callable[[], Work | None]:
        def move() -> Work | None:
            link = _here().links.get(self._address.process)
            return None if link is None else link.at_once(what, memory, self._region, offset or 0)

        return move

    def _adding(self, offset: int, value: int) -> Callable[[], Work]:
        self._check(offset, _WORD)
        if self._is_here():
            return lambda: _Done(_here().endpoint.fetch_add(self._region, offset, value))
        return lambda: self._link().fetch_add(self._region, offset, value)

    def _swapping(self, offset: int, expected: int, desired: int) -> Callable[[], Work]:
        self._check(offset, _WORD)
        if self._is_here():
            return lambda: _Done(_here().endpoint.compare_swap(self._region, offset, expected, desired))
        return lambda: self._link().compare_swap(self._region, offset, expected, desired)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or offset + size > self.size():
            raise AccessRefused(
                f"bytes {offset:,} to {offset + size:,} are out of the bounds of this buffer, which has {self.size():,}"
            )


def _checked(memory: Memory, writable: bool) -> None:
    """Raise MonarchError for memory that no transport can move. Transports check memory of devices themselves."""
    if buffers.device_of(memory) == "cpu":
        buffers.view_of(memory, writable)


def _beginning(memory: Memory, size: int) -> Memory:
    """So many bytes of memory that has more."""
    if buffers.device_of(memory) == "cpu":
        return buffers.view_of(memory, writable=True)[:size]
    import torch

    buffers.device_range(memory)
    return memory.detach().view(-1).view(torch.uint8)[:size]


def _collected(process: _Process, registration: Registration) -> None:
    if registration.region.number not in process.shared:
        registration.drop_soon()


def _unpickle(address: object, region: object, secret: bytes) -> RDMABuffer:
    buffer = RDMABuffer.__new__(RDMABuffer)
    buffer._fill(Address.from_json(address), Region.from_json(region), secret, None)
    return buffer


def _nothing(transfer: Transfer[int | None]) -> Transfer[None]:
    return transfer  # type: ignore[return-value]  # the work of a transfer gives None


def _number(transfer: Transfer[int | None]) -> Transfer[int]:
    return transfer  # type: ignore[return-value]  # the work of an atomic gives the old word


# -- batches -----------------------------------------------------------------------------------------------------------


class RDMAAction:
    """Several actions, begun together and waited for together.

        batch = RDMAAction()
        batch.read_into(weights, here).write_from(gradients, there)
        batch.submit().get()

    They run side by side, in no order. Can be submitted any number of times.
    """

    def __init__(self) -> None:
        self._starts: list[Callable[[], Work]] = []
        self._ranges: list[tuple[int, int, bool]] = []

    def __len__(self) -> int:
        return len(self._starts)

    def read_into(self, buffer: RDMABuffer, dst: Memory, *, offset: int | None = None) -> RDMAAction:
        """As `RDMABuffer.read_into`."""
        self._add(buffer._reading(dst, offset).begin, dst, written=True)
        return self

    def write_from(self, buffer: RDMABuffer, src: Memory, *, offset: int | None = None) -> RDMAAction:
        """As `RDMABuffer.write_from`."""
        self._add(buffer._writing(src, offset).begin, src, written=False)
        return self

    def read_remote(self, dst: Memory, src: RDMABuffer) -> RDMAAction:
        """`read_into` with PyTorch Monarch's name and order of arguments."""
        return self.read_into(src, dst)

    def write_remote(self, dst: RDMABuffer, src: Memory) -> RDMAAction:
        """`write_from` with PyTorch Monarch's name."""
        return self.write_from(dst, src)

    def fetch_add(self, buffer: RDMABuffer, offset: int, value: int) -> RDMAAction:
        """As `RDMABuffer.fetch_add`; the old word is among the results."""
        self._starts.append(buffer._adding(offset, value))
        return self

    def compare_swap(self, buffer: RDMABuffer, offset: int, expected: int, desired: int) -> RDMAAction:
        """As `RDMABuffer.compare_swap`; the old word is among the results."""
        self._starts.append(buffer._swapping(offset, expected, desired))
        return self

    def submit(self, *, timeout: float | None = 3) -> Transfer[list[int | None]]:
        """Begin them all. The future gives a list: the old word of each atomic, None for the others, in the order in
        which they were added; it raises the first error, once all have ended. `timeout` is in seconds, for all of them;
        None: without end."""
        starts = list(self._starts)
        transfer: Transfer[list[int | None]] = Transfer(timeout)
        left = len(starts)
        lock = threading.Lock()
        transfers = [_begin(_Start(start), timeout) for start in starts]

        def ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = not left
            if last:
                transfer.resolve(lambda: [each.get(0) for each in transfers])

        for each in transfers:
            each.when_done(ended)
        if not transfers:
            transfer.resolve(list)
        return transfer

    def _add(self, start: Callable[[], Work], memory: Memory, written: bool) -> None:
        if buffers.device_of(memory) == "cpu":
            view = buffers.view_of(memory)
            begin, end = buffers.address_of(view), buffers.address_of(view) + view.nbytes
            for other_begin, other_end, other_written in self._ranges:
                if (written or other_written) and begin < other_end and other_begin < end:
                    shared = min(end, other_end) - max(begin, other_begin)
                    raise MonarchError(
                        f"two actions of this batch use the same {shared:,} bytes here, and one of them writes them",
                        hint="Actions of a batch run in no order. Use two batches.",
                    )
            self._ranges.append((begin, end, written))
        self._starts.append(start)
