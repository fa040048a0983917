"""The records of streams, as frozen data. `codec` makes them bytes, `relay` acts on them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from monarch.runtime.control import limits
from monarch.runtime.control.message import Message

Ranges = tuple[tuple[int, int], ...]
"""Host numbers as (start, stop), in rising order, not touching each other."""


class Malformed(ValueError):
    """The other side has sent bytes that the protocol does not allow."""


@dataclass(frozen=True)
class HostInfo:
    """A host, as it says of itself when it is attached.

    `number`     its place among the addresses that were attached
    `address`    as the controller has it
    `memory`     bytes of it
    `python`, `torch`, `monarch`    versions; torch's is "" where it is not installed
    `network`    the identity of its machine and network namespace
    `advertise`  the address by which workers of other hosts reach its workers; "" where it was started without one
    `data_bind`  the address on which its workers listen for workers of other hosts; "" as above
    """

    number: int
    address: str
    hostname: str
    cores: int
    memory: int
    pid: int
    python: str
    torch: str
    monarch: str
    network: str
    advertise: str = ""
    data_bind: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class Attach:
    number: int
    addresses: tuple[str, ...]
    fan_out: int
    timeout: float
    reconnect: float = 0.0
    """For so many seconds both ends of a stream wait for a new connection where theirs has broken."""

    @property
    def stop(self) -> int:
        return self.number + len(self.addresses)


@dataclass(frozen=True, slots=True)
class Attached:
    hosts: tuple[HostInfo, ...]
    failures: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """A message whose data is `size` bytes long, with the bytes that have arrived. `targets` None is all hosts."""

    kind: str
    mesh: int = 0
    host: int = 0
    targets: Ranges | None = None
    head: bytes = b"{}"
    size: int = 0
    data: Any = b""


@dataclass(frozen=True, slots=True)
class HostPart:
    mesh: int
    host: int
    data: Any


@dataclass(frozen=True, slots=True)
class Progress:
    kind: str
    mesh: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    mesh: int


@dataclass(frozen=True, slots=True)
class Close:
    reason: str = ""


Record = Beat | Attach | Attached | Start | HostPart | Progress | Lost | Forget | Close


def started(message: Message, *, host: int = 0, targets: Ranges | None = None) -> Start:
    """A whole message as one record. Raises ValueError for a message that cannot be sent."""
    if not message.kind.isidentifier() or len(message.kind) > limits.KIND_LETTERS:
        raise ValueError(f"a message's kind is a word of at most {limits.KIND_LETTERS} letters, not {message.kind!r}")
    head = json.dumps(message.head, separators=(",", ":"), allow_nan=False).encode()
    if len(head) > limits.HEAD_BYTES:
        raise ValueError(f"the head of a message is {len(head):,} bytes, and at most {limits.HEAD_BYTES:,} can be sent")
    data = memoryview(message.data).cast("B") if message.data is not None and len(message.data) else memoryview(b"")
    if len(data) > limits.MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data):,} bytes: at most {limits.MESSAGE_BYTES:,} can be sent")
    return Start(message.kind, message.mesh, host, targets, head, len(data), data)


def ranges(hosts: Iterable[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for host in sorted(set(hosts)):
        if found and found[-1][1] == host:
            found[-1] = (found[-1][0], host + 1)
        else:
            found.append((host, host + 1))
    return tuple(found)


@dataclass
class Assembly:
    """The messages of one direction of a stream, put together from their records. Parts of messages of different
    meshes and hosts come mixed; those of one mesh and host, one message after the other."""

    _open: dict[tuple[int, int], tuple[Start, bytearray, int]] = field(default_factory=dict)

    def take(self, record: Start | HostPart) -> Message | None:
        """The message that this record completes."""
        lane = (record.mesh, record.host)
        if isinstance(record, Start):
            if lane in self._open:
                raise Malformed(f"a message of mesh {record.mesh} begins before the last one's end")
            if len(record.data) == record.size:
                return _message(record, bytes(record.data))
            try:
                start, buffer, filled = record, bytearray(record.size), 0
            except MemoryError:
                raise Malformed(f"there is no memory for a message of {record.size:,} bytes") from None
        else:
            if lane not in self._open:
                raise Malformed(f"a part of mesh {record.mesh} belongs to no message")
            start, buffer, filled = self._open.pop(lane)
        end = filled + len(record.data)
        if end > start.size:
            raise Malformed(f"a message of {start.size:,} bytes has parts of {end:,}")
        buffer[filled:end] = record.data
        if end == start.size:
            return _message(start, memoryview(buffer))
        self._open[lane] = (start, buffer, end)
        return None

    def drop(self, start: int, stop: int) -> None:
        """The unfinished messages of these hosts will not be finished."""
        for lane in [lane for lane in self._open if start <= lane[1] < stop]:
            del self._open[lane]


def _message(start: Start, data: Any) -> Message:
    return Message(start.kind, start.mesh, start.host, read_head(start.head), data)


def read_head(text: bytes) -> dict[str, Any]:
    if len(text) > limits.HEAD_BYTES:
        raise Malformed(f"a head of {len(text):,} bytes: at most {limits.HEAD_BYTES:,} are taken")
    try:
        head = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a head is not JSON: {error}") from None
    if not isinstance(head, dict):
        raise Malformed(f"a head is a JSON object, not a {type(head).__name__}")
    return head


def _refuse(name: str) -> None:
    raise Malformed(f"a head holds {name}, which is not JSON")
