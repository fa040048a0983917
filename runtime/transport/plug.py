"""The interface of a transport to the endpoint, and the table of all transports.

An endpoint makes one object of each transport's class. Two processes agree on a transport so:

    dialer                                          acceptor (on its endpoint's I/O thread: never blocks)
      (both have proved to know the secret, over a socket that becomes the link's stream)
      offer = transport.offer(peer)        ──▶        transport.accept(stream, offer's details and files)
      transport.dial(stream, offer, answer) ◀──       gives the link at its end, and an answer
      use it                               ──▶        the link is the endpoint's

Either side refuses by raising Unsuitable with the reason; then the next of the dialer's preferences is offered. Every
link is a `stream.StreamLink`: whatever a transport has no way of its own for (atomics, memory that it does not reach, a
word that only its owner can wake) goes as frames over the link's stream, and the stream's end is the peer's death. So a
transport overrides the methods that it does better, and nothing else:

    StreamLink(stream, transport)               `transport` is its name
        put, get, post                          override; `super()`'s go over the stream, checked by the owner
        control(message, files)                 override: called on the I/O thread for what the peer's `tell` sent
        ended(error)                            override: called once, when the link is lost or closed
        tell(message, files=())                 send a small JSON message to the link at the other end
        lose(error)                             end the link: every unfinished work raises `error` (a LinkLost)
        work() -> Pending                       a new work that ends with the link; `.finish(value)`, `.fail(error)`
    Regions
        find(number) -> Owned | None
        wake(owned, offset)                     wake who sleeps on a word
    Loop
        watch(fd, EPOLLIN, call), unwatch(fd)   call(events) on the I/O thread
        call(function)                          soon, on the I/O thread
        run(function)                           likewise, and wait for its value (at once when on that thread)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from monarch.runtime.transport.interface import Address, Memory

if TYPE_CHECKING:
    from monarch.runtime.transport.loop import Loop
    from monarch.runtime.transport.regions import Regions
    from monarch.runtime.transport.stream import StreamLink
    from monarch.runtime.transport.streams import Stream


class Unsuitable(Exception):
    """This transport does not join these two processes; the text says why."""


@dataclass(frozen=True)
class Offer:
    """A dialer's offer of a transport.

    `details`  plain JSON data, sent to the acceptor, at most some kilobytes
    `files`    file descriptors sent along, over a local socket only; closed by the transport in `dial` or `withdraw`
    `state`    the transport's own, not sent
    """

    details: dict[str, Any] = field(default_factory=dict)
    files: tuple[int, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class Accepted:
    """The acceptor's end, and the details that the dialer needs to finish its own."""

    link: StreamLink
    details: dict[str, Any] = field(default_factory=dict)
    files: tuple[int, ...] = ()


@dataclass(eq=False)
class Owned:
    """Registered memory at its owner.

    `view`     its bytes, or None where they are not host memory
    `address`  of its first byte, as this process sees it; a device pointer for memory of a device
    `file`     a memfd that holds the memory, from byte `offset`, or None
    `device`   "cpu", "cuda:0"
    `dropped`  set first when the memory is dropped: nothing may begin to read or write it then
    `diverted` other targets of puts, by their offset and the value that their signal stores
    """

    number: int
    key: bytes
    memory: Memory
    view: memoryview | None
    address: int
    size: int
    writable: bool
    file: int | None
    offset: int
    device: str
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: bool = False
    diverted: dict[tuple[int, int], memoryview] = field(default_factory=dict)


@dataclass(frozen=True)
class EndpointContext:
    """The parts of an endpoint that its transports use. `loop` runs callbacks on the I/O thread, and starts it."""

    process: str
    host: str
    loop: Loop
    regions: Regions


class Transport(Protocol):
    """One way from process to process. Made as `Class(context)`, after the fork: it may hold what does not
    survive one. Safe to use from several threads."""

    name: str
    streams: tuple[str, ...]
    """The kinds of stream that its links can stand on, the preferred first: "local" (a Unix socket on the same host,
    which carries files), "tcp"."""

    def available(self) -> str | None:
        """Why it cannot be used in this process at all, or None where it can. Asked once."""

    def register(self, owned: Owned) -> dict[str, Any] | None:
        """Make the memory reachable for peers; gives the details that they need, as plain JSON data (it becomes
        `region.details[name]`), or None where this transport adds nothing for such memory. Raises MonarchError."""

    def drop(self, owned: Owned) -> None:
        """Take it back: when this returns no peer reads or writes the memory through this transport."""

    def offer(self, peer: Address) -> Offer:
        """At the dialer: the offer. Raises Unsuitable."""

    def accept(self, stream: Stream, details: Mapping[str, Any], files: Sequence[int]) -> Accepted:
        """At the acceptor, on the I/O thread: must not block. The details come from an authenticated peer, and are
        checked all the same. The files are this transport's to close. Raises Unsuitable."""

    def dial(self, stream: Stream, offer: Offer, details: Mapping[str, Any], files: Sequence[int]) -> StreamLink:
        """At the dialer: make the link from the acceptor's answer. Raises Unsuitable."""

    def withdraw(self, offer: Offer) -> None:
        """The acceptor refused this offer, or nothing came back: free its resources."""

    def close(self) -> None:
        """The endpoint is closed, and all its links are."""


TRANSPORTS = {
    "cuda": "monarch.runtime.transport.cuda.transport:CudaTransport",
    "shm": "monarch.runtime.transport.shm:ShmTransport",
    "verbs": "monarch.runtime.transport.verbs.transport:VerbsTransport",
    "tcp": "monarch.runtime.transport.tcp:TcpTransport",
}
"""Where the class of each transport is, in order of preference; loaded when an endpoint is made that is to use it. A
transport is added by a line here."""

IN_THE_CLEAR = frozenset({"verbs"})
"""Those whose bytes cross a network as they are, also between endpoints that have TLS."""


def load(name: str) -> type[Any]:
    module, _, attribute = TRANSPORTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
