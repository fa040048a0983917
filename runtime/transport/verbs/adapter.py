"""The few verbs that the transport uses, and which library makes them.

`pyverbs` belongs to rdma-core and comes with the system (Debian: python3-pyverbs); `ibverbs` is a package on PyPI that
opens the system's libibverbs. Both need libibverbs and the device's driver in user space (Debian: ibverbs-providers).

The numbers below are those of <infiniband/verbs.h>; they are part of its binary interface, and do not change.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LIBRARIES = ("pyverbs", "ibverbs")
"""In order of preference: `with_<name>` is the module that speaks to it."""

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4
ACTIVE = 4
INFINIBAND, ETHERNET = 1, 2
WRITE, SEND, READ = 0, 2, 4
SIGNALED = 2
RELIABLE = 2
RECEIVED = 128
SUCCESS, FLUSHED = 0, 5

STATUS = {
    1: "local length error",
    2: "local queue pair operation error",
    4: "local protection error: the memory is not registered any more",
    5: "flushed: the queue pair had failed before",
    9: "the peer refused the request as invalid",
    10: "the peer's device refused the access: memory that is not registered, or a wrong key",
    11: "the peer's device failed",
    12: "the peer's device does not answer",
    13: "the peer's device has no receive posted",
}
"""The meaning of a completion's status, where there is more to say than its number."""


class NoVerbs(Exception):
    """There is no RDMA here; the text says what is missing."""


class VerbsFailed(Exception):
    """A verb failed. `errno` is that of the call, or None."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


@dataclass(frozen=True)
class Completion:
    """`number` is that of the request; `received` tells whether it was a receive, of `size` bytes."""

    number: int
    status: int
    received: bool
    size: int


@dataclass(frozen=True)
class PortState:
    """`mtu` counts 1 for 256 bytes, 2 for 512, up to 5 for 4,096; `lid` is 0 where the link is Ethernet."""

    number: int
    active: bool
    link_layer: int
    lid: int
    mtu: int
    max_message: int


@dataclass(frozen=True)
class Path:
    """How a queue pair reaches its peer.

    `gid` (16 bytes) is the peer's, and `gid_index` names ours; by `lid` where `gid` is None (InfiniBand, one subnet).
    `mtu` as in PortState; `send_number` and `receive_number` are the first packets' numbers, 24 bits each; `reads` is
    how many RDMA reads may be under way at once, in each direction.
    """

    port: int
    queue_pair: int
    mtu: int
    send_number: int
    receive_number: int
    reads: int
    lid: int
    gid: bytes | None
    gid_index: int

    # A request is repeated after 4.096 us * 2 ** TIMEOUT = 1 s, RETRIES times, before the link gives up the peer.
    TIMEOUT = 18
    RETRIES = 7
    # How long a peer without a posted receive has to post one, again and again (7: without end): 0.64 ms.
    PAUSE = 12
    HOPS = 64


class MemoryRegion(Protocol):
    """`address` is by what requests name its first byte."""

    address: int
    local_key: int
    remote_key: int

    def close(self) -> None: ...


class Completions(Protocol):
    """A completion queue. `fd` becomes readable when there is something to `take`."""

    fd: int

    def take(self) -> list[Completion]:
        """All completions so far, after a request to be notified of the next one: none can slip in between."""

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection. Sizes are at most the port's `max_message`; `number` comes back in the completion."""

    number: int

    def connect(self, path: Path) -> None: ...

    def write(
        self, number: int, address: int, local_key: int, size: int, remote: int, remote_key: int, signaled: bool
    ) -> None: ...

    def read(
        self, number: int, address: int, local_key: int, size: int, remote: int, remote_key: int, signaled: bool
    ) -> None: ...

    def send(self, number: int, address: int, local_key: int, size: int, signaled: bool) -> None: ...

    def receive(self, number: int, address: int, local_key: int, size: int) -> None: ...

    def close(self) -> None: ...


class Device(Protocol):
    """An open device with one protection domain. Every method may raise VerbsFailed."""

    name: str
    reads: int
    """How many RDMA reads from its peer a queue pair can serve at once."""

    def port(self, number: int) -> PortState: ...

    def register(self, address: int, size: int, access: int) -> MemoryRegion: ...

    def register_dmabuf(self, fd: int, offset: int, size: int, access: int) -> MemoryRegion:
        """Register `size` bytes of a dma-buf from byte `offset`."""

    def completions(self, depth: int) -> Completions: ...

    def queue_pair(self, completions: Completions, sends: int, receives: int) -> QueuePair: ...

    def close(self) -> None: ...


class Library(Protocol):
    name: str

    def devices(self) -> Sequence[str]:
        """The names of all. Raises VerbsFailed."""

    def open(self, device: str) -> Device: ...


def library(names: Sequence[str] | None = None) -> Library:
    """The first library that can be used. Raises NoVerbs where none can, or there is no device: all ask the same
    libibverbs for that."""
    missing = []
    for name in LIBRARIES if names is None else names:
        module: Any = importlib.import_module(f"monarch.runtime.transport.verbs.with_{name}")
        try:
            found: Library = module.load()
        except NoVerbs as error:
            missing.append(f"{name}: {error}")
            continue
        try:
            devices = found.devices()
        except VerbsFailed as error:
            raise NoVerbs(f"no RDMA device: ibv_get_device_list() fails: {error}") from error
        if not devices:
            raise NoVerbs("no RDMA device: ibv_get_device_list() is empty")
        return found
    raise NoVerbs("; ".join(missing))
