"""Records as the bytes of frames, and back. Incoming bytes are checked to the last field; Malformed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from monarch.runtime.control import limits
from monarch.runtime.control import monarch_pb2 as pb
from monarch.runtime.control.records import (
    Attach,
    Attached,
    Beat,
    Close,
    Forget,
    HostInfo,
    HostPart,
    Lost,
    Malformed,
    Progress,
    Ranges,
    Record,
    Start,
)

_HOST_FIELDS = tuple(HostInfo.__dataclass_fields__)


def encode(records: Sequence[Record]) -> tuple[bytes, bytes]:
    """The head and the data of a frame."""
    batch = pb.Batch()
    pieces: list[Any] = []
    for record in records:
        _write(batch.records.add(), record, pieces)
    return batch.SerializeToString(), pieces[0] if len(pieces) == 1 and type(pieces[0]) is bytes else b"".join(pieces)


def _write(to: pb.Record, record: Record, pieces: list[Any]) -> None:
    match record:
        case Beat(waiting):
            to.beat.waiting = waiting
            to.beat.SetInParent()
        case Start(kind, mesh, host, targets, head, size, data):
            flat = [] if targets is None else [number for pair in targets for number in pair]
            to.start.CopyFrom(
                pb.Start(
                    kind=kind,
                    mesh=mesh,
                    host=host,
                    all=targets is None,
                    targets=flat,
                    head=head,
                    size=size,
                    data=len(data),
                )
            )
            pieces.append(data)
        case HostPart(mesh, host, data):
            to.part.CopyFrom(pb.Part(mesh=mesh, host=host, data=len(data)))
            pieces.append(data)
        case Progress(kind, mesh, numbers):
            to.progress.CopyFrom(pb.Progress(kind=kind, mesh=mesh, numbers=numbers))
        case Attach(number, addresses, fan_out, timeout, reconnect):
            to.attach.CopyFrom(
                pb.Attach(
                    number=number,
                    addresses=addresses,
                    fan_out=fan_out,
                    timeout_ms=round(timeout * 1000),
                    reconnect_ms=round(reconnect * 1000),
                )
            )
        case Attached(hosts, failures):
            to.attached.CopyFrom(
                pb.Attached(
                    hosts=[pb.Host(**{name: getattr(host, name) for name in _HOST_FIELDS}) for host in hosts],
                    failures=[pb.Failure(number=number, reason=_short(reason)) for number, reason in failures],
                )
            )
        case Lost(start, stop, reason):
            to.lost.CopyFrom(pb.Lost(start=start, stop=stop, reason=_short(reason)))
        case Forget(mesh):
            to.forget.CopyFrom(pb.Forget(mesh=mesh))
        case Close(reason):
            to.close.CopyFrom(pb.Close(reason=_short(reason)))


def _short(text: str) -> str:
    return text if len(text) <= limits.TEXT_BYTES // 4 else text[: limits.TEXT_BYTES // 4] + "..."


def decode(head: bytes, data: bytes) -> list[Record]:
    """The records of a frame. Their data are views of the frame's."""
    try:
        batch = pb.Batch.FromString(head)
    except DecodeError as error:
        raise Malformed(f"a batch cannot be read: {error}") from None
    if len(batch.records) > limits.FRAME_RECORDS:
        raise Malformed(f"a frame of {len(batch.records):,} records: at most {limits.FRAME_RECORDS:,} are taken")
    view = memoryview(data)
    at = 0
    records: list[Record] = []
    for record in batch.records:
        what = record.WhichOneof("what")
        if what is None:
            raise Malformed("a record says nothing")
        if what in ("start", "part"):
            length = getattr(record, what).data
            if at + length > len(view):
                raise Malformed(f"a frame has {len(view):,} bytes of data, and its records speak of more")
            piece = view[at : at + length]
            at += length
            records.append(_start(record.start, piece) if what == "start" else _part(record.part, piece))
        else:
            records.append(_READERS[what](getattr(record, what)))
    if at != len(view):
        raise Malformed(f"a frame has {len(view):,} bytes of data, and its records speak of {at:,}")
    return records


def _start(start: pb.Start, data: memoryview) -> Start:
    if start.size > limits.MESSAGE_BYTES:
        raise Malformed(f"a message of {start.size:,} bytes: at most {limits.MESSAGE_BYTES:,} are taken")
    if len(data) > start.size:
        raise Malformed(f"a message of {start.size:,} bytes has a first part of {len(data):,}")
    if len(start.head) > limits.HEAD_BYTES:
        raise Malformed(f"a head of {len(start.head):,} bytes: at most {limits.HEAD_BYTES:,} are taken")
    targets: Ranges | None = None
    if start.all:
        if start.targets:
            raise Malformed("a message is for all hosts, and for some")
    else:
        targets = _ranges(start.targets)
    return Start(_kind(start.kind), start.mesh, _number(start.host), targets, start.head, start.size, data)


def _ranges(flat: Sequence[int]) -> Ranges:
    if (
        len(flat) % 2
        or any(a >= b for a, b in zip(flat, flat[1:], strict=False))
        or any(n > limits.HOSTS for n in flat)
    ):
        raise Malformed("the hosts that a message is for are no rising ranges")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _part(part: pb.Part, data: memoryview) -> HostPart:
    if not data:
        raise Malformed("a part of a message is empty")
    return HostPart(part.mesh, _number(part.host), data)


def _progress(progress: pb.Progress) -> Progress:
    if not 1 <= len(progress.numbers) <= limits.NUMBERS:
        raise Malformed(f"progress of {len(progress.numbers):,} numbers: 1 to {limits.NUMBERS} are taken")
    return Progress(_kind(progress.kind), progress.mesh, tuple(progress.numbers))


def _attach(attach: pb.Attach) -> Attach:
    if not 1 <= len(attach.addresses) <= limits.HOSTS - _number(attach.number):
        raise Malformed(f"{len(attach.addresses):,} hosts to attach: 1 to {limits.HOSTS:,} are taken")
    if not 1 <= attach.fan_out <= limits.FAN_OUT:
        raise Malformed(f"a fan-out of {attach.fan_out}: 1 to {limits.FAN_OUT} are taken")
    least, most = limits.TIMEOUT_SECONDS
    timeout = attach.timeout_ms / 1000
    if not least <= timeout <= most:
        raise Malformed(f"a timeout of {timeout} s: {least} s to {most} s are taken")
    reconnect = attach.reconnect_ms / 1000
    if reconnect > limits.RECONNECT_SECONDS[1]:
        raise Malformed(f"{reconnect} s to reconnect: at most {limits.RECONNECT_SECONDS[1]} s are taken")
    addresses = tuple(_text(address) for address in attach.addresses)
    return Attach(attach.number, addresses, attach.fan_out, timeout, reconnect)


def _attached(attached: pb.Attached) -> Attached:
    for host in attached.hosts:
        _number(host.number)
    hosts = tuple(HostInfo(**{name: _checked(getattr(host, name)) for name in _HOST_FIELDS}) for host in attached.hosts)
    return Attached(hosts, tuple((_number(each.number), _text(each.reason)) for each in attached.failures))


def _lost(lost: pb.Lost) -> Lost:
    if not lost.start < lost.stop <= limits.HOSTS:
        raise Malformed(f"the hosts from {lost.start} up to {lost.stop} are none")
    return Lost(lost.start, lost.stop, _text(lost.reason))


def _checked(value: Any) -> Any:
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """A name, an address or a reason, for people: control characters have no place in it."""
    if len(text) > limits.TEXT_BYTES:
        raise Malformed(f"a text of {len(text):,} letters: at most {limits.TEXT_BYTES:,} are taken")
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _kind(kind: str) -> str:
    if not kind.isidentifier() or len(kind) > limits.KIND_LETTERS:
        raise Malformed("a message's kind is not a word")
    return kind


def _number(host: int) -> int:
    if host >= limits.HOSTS:
        raise Malformed(f"host {host}: there are at most {limits.HOSTS:,}")
    return host


_READERS: dict[str, Callable[[Any], Record]] = {
    "beat": lambda beat: Beat(beat.waiting),
    "attach": _attach,
    "attached": _attached,
    "progress": _progress,
    "lost": _lost,
    "forget": lambda forget: Forget(forget.mesh),
    "close": lambda close: Close(_text(close.reason)),
}
