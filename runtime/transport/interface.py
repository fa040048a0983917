"""The interface of a transport: one-sided access to the registered memory of another process.

    endpoint = Endpoint(secret)                        one a process: see `endpoint`
    registration = endpoint.register(memory)           memory that peers may reach, as `registration.region`
    link = peers_endpoint.connect(endpoint.address, secret)
    link.put(source, region, offset, Signal(region, word, 7)).wait()

The owner of the memory takes no part but for its endpoint's own thread. Puts over one link arrive in their order;
nothing is said about the order of two links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport.errors import AccessRefused as AccessRefused
from monarch.runtime.transport.errors import LinkLost as LinkLost

Memory = Any
"""A contiguous tensor (of any dtype, on any device that the transport reaches), or a contiguous buffer: a memoryview,
mmap, bytearray or numpy array. A target has to be writable."""

Check = Callable[[], None]
"""Called now and then while something is waited for, at least every 50 ms; raises to give up."""


@dataclass(frozen=True)
class Address:
    """Where an endpoint can be reached. Plain data, no secret; `to_json` and `from_json` are exact.

    `process`  32 hex digits, random, new for each endpoint (and after a fork)
    `host`     32 hex digits for the machine and its network namespace: only equal ones share memory
    `offers`   how it can be reached, by kind of socket: {"local": {"name": ...}, "tcp": {"host": ..., "port": ...}}
    """

    process: str
    host: str
    offers: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {"process": self.process, "host": self.host, "offers": self.offers}

    @staticmethod
    def from_json(data: object) -> Address:
        """Raises MonarchError, whatever the data is, where it is not an address."""
        process, host, offers = _fields(data, "an address", ("process", "host", "offers"))
        return Address(
            _hex_digits(process, "an address's process"),
            _hex_digits(host, "an address's host"),
            _objects(offers, "an address's offers"),
        )


@dataclass(frozen=True)
class Region:
    """Registered memory, as peers name it. Its possession is the right to read and write that memory, so send it only
    to processes that may. Plain data; `to_json` and `from_json` are exact.

    `number`   the owner's, never used twice
    `key`      32 hex digits, random, compared by the owner in constant time
    `size`     bytes
    `details`  data of each transport, by its name, for example {"verbs": {"address": ..., "rkey": ...}}
    """

    number: int
    key: str
    size: int
    details: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {"number": self.number, "key": self.key, "size": self.size, "details": self.details}

    @staticmethod
    def from_json(data: object) -> Region:
        """Raises MonarchError, whatever the data is, where it is not a region."""
        number, key, size, details = _fields(data, "a region", ("number", "key", "size", "details"))
        return Region(
            _natural(number, "a region's number"),
            _hex_digits(key, "a region's key"),
            _natural(size, "a region's size"),
            _objects(details, "a region's details"),
        )


@dataclass(frozen=True)
class Signal:
    """Store `value` as a signed 8-byte word of `region` at byte `offset` (a multiple of 8), once all bytes of this put,
    and of the puts before it on the same link, can be read there; then wake the threads that sleep on that word
    (`futex`)."""

    region: Region
    offset: int
    value: int


class Work(Protocol):
    """Something under way. Finished once the bytes are where they are to be (also at the owner), or can never be."""

    def done(self) -> bool: ...

    def then(self, call: Callable[[], None]) -> None:
        """Call the function at the end, on the thread that finishes the work; at once if it is finished."""

    def wait(self, timeout: float | None = None, check: Check | None = None) -> int | None:
        """Wait for the end. Gives the old word for atomics, None otherwise. Raises LinkLost, AccessRefused, what
        `check` raises (the work then goes on), or TimeoutError (too)."""


class Link(Protocol):
    """A connection to one endpoint, over one transport. Safe to use from several threads."""

    transport: str
    """ "shm", "tcp", "verbs", "cuda" """
    reasons: tuple[str, ...]
    """Why it is this transport: a line for each that was tried before it, and one for itself."""
    peer: Address
    messages: int
    """Handshakes, registrations and other control messages sent over this link so far: a compiled step sends none."""

    def put(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> Work:
        """Write `source` into the region, from byte `offset`. `source` must not change before the work is finished."""

    def get(self, target: Memory, region: Region, offset: int = 0) -> Work:
        """Fill `target` from the region, from byte `offset`."""

    def post(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> None:
        """Like `put`, but without a sign of its end: `source` must stay as it is until the peer says, by a signal of
        its own, that it has the bytes that it needs. The cheapest way to send. An error breaks the link. Blocks only as
        long as the transport's own buffers are full; raises LinkLost."""

    def fetch_add(self, region: Region, offset: int, value: int) -> Work:
        """Add to the signed 8-byte word at byte `offset` (a multiple of 8; wraps around); the work gives the old
        word. Atomic with all other atomics on that word, over whichever transport they come."""

    def compare_swap(self, region: Region, offset: int, expected: int, desired: int) -> Work:
        """Store `desired` in the word if it is `expected`; the work gives the old word."""

    def close(self) -> None: ...


# -- reading data from other processes --------------------------------------------------------------------------------


def _fields(data: object, what: str, names: tuple[str, ...]) -> list[object]:
    if not isinstance(data, Mapping) or set(data) != set(names):
        raise MonarchError(f"this is not {what}: it has to be an object of {', '.join(names)}")
    return [data[name] for name in names]


def _hex_digits(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise MonarchError(f"{what} has to be 32 hex digits")
    return value


def _natural(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise MonarchError(f"{what} has to be a whole number from 0 to 2**63 - 1")
    return value


def _objects(value: object, what: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or len(value) > 16:
        raise MonarchError(f"{what} have to be an object of at most 16 entries")
    for name, entry in value.items():
        if not isinstance(name, str) or len(name) > 32 or not isinstance(entry, Mapping):
            raise MonarchError(f"{what} have to be objects by name")
    return {name: dict(entry) for name, entry in value.items()}
