"""The frames of a link's stream: a header of fixed size, and perhaps a payload.

PUT, POST   payload into a region, then perhaps a signal; a PUT is answered by DONE or REFUSED
GET         answered by DATA and then DONE, or REFUSED
ADD, SWAP   a word; answered by DONE with the old value, or REFUSED
TELL        JSON between the transport's two ends, perhaps with files
BROKEN      why the sender ends the link
CLOSE       the sender has finished
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from typing import Final

from monarch.runtime.transport.interface import AccessRefused, Region, Signal
from monarch.runtime.transport.plug import Owned

PUT, POST, GET, ADD, SWAP, DONE, REFUSED, DATA, TELL, BROKEN, CLOSE = range(1, 12)

HEADER: Final = struct.Struct("<BB6xQQQ16sQQ16sQq")
"""Kind, files; the work's number, the payload's size; region, key, offset; the signal's region, key, offset, and a
value. A GET's size, and the word that a SWAP stores, are in the place of a signal's offset; in a DONE the place of a
region says whether it has a value."""

SIZE: Final = HEADER.size
NO_KEY: Final = bytes(16)
EMPTY: Final = memoryview(b"")
_ZEROS: Final = memoryview(bytes(256 << 10))


def plain(kind: int, number: int = 0, text: bytes = b"", files: int = 0) -> memoryview:
    """A frame that names no memory."""
    return memoryview(HEADER.pack(kind, files, number, len(text), 0, NO_KEY, 0, 0, NO_KEY, 0, 0) + text)


def request(kind: int, number: int, size: int, region: Region, offset: int, signal: Signal | None) -> bytes:
    """The header of a PUT or a POST of so many bytes, with the signal that is to follow."""
    if signal is None:
        return HEADER.pack(kind, 0, number, size, region.number, key_of(region), offset, 0, NO_KEY, 0, 0)
    word = signal.region
    return HEADER.pack(
        kind,
        0,
        number,
        size,
        region.number,
        key_of(region),
        offset,
        word.number,
        key_of(word),
        signal.offset,
        signal.value,
    )


def key_of(region: Region) -> bytes:
    """A region's key as it travels."""
    return _bytes_of(region.key)


_bytes_of = functools.lru_cache(4096)(bytes.fromhex)


def done(number: int, value: int | None = None) -> memoryview:
    return memoryview(HEADER.pack(DONE, 0, number, 0, value is not None, NO_KEY, 0, 0, NO_KEY, 0, value or 0))


def refused(number: int, error: AccessRefused) -> memoryview:
    return plain(REFUSED, number, json.dumps([error.message, error.hint]).encode())


class Outgoing:
    """A frame that waits in an outbox, or the rest of it. Its files are closed once they are sent."""

    __slots__ = ("buffers", "files")

    def __init__(self, *buffers: memoryview, files: Sequence[int] = ()) -> None:
        self.buffers = [*buffers]
        self.files = files


class Answer(Outgoing):
    """A get's answer: a header, the bytes of a region, and a header that says that they are whole."""

    __slots__ = ("number", "owned", "size")

    def __init__(self, owned: Owned, view: memoryview, number: int) -> None:
        self.owned: Owned | None = owned
        self.number = number
        self.size = view.nbytes
        header = HEADER.pack(DATA, 0, number, self.size, 0, NO_KEY, 0, 0, NO_KEY, 0, 0)
        super().__init__(*[each for each in (memoryview(header), view, done(number)) if each.nbytes])

    def look(self) -> None:
        """If the region was dropped, the rest of it goes out as zeros, and a refusal follows."""
        if self.owned is None or not self.owned.dropped:
            return
        self.owned = None
        data = min(self.size, sum(buffer.nbytes for buffer in self.buffers) - SIZE)
        if data <= 0:
            return  # all of it had been read
        header = self.buffers[0] if len(self.buffers) == 3 else EMPTY
        whole, rest = divmod(data, _ZEROS.nbytes)
        end = refused(self.number, AccessRefused("the region was dropped while it was read"))
        self.buffers = [each for each in (header, *[_ZEROS] * whole, _ZEROS[:rest], end) if each.nbytes]


def advance(buffers: list[memoryview], sent: int) -> int:
    """Take `sent` bytes off the front of the buffers; gives how many of them remain."""
    while buffers and sent >= buffers[0].nbytes:
        sent -= buffers.pop(0).nbytes
    if buffers and sent:
        buffers[0] = buffers[0][sent:]
        sent = 0
    return sent


def signed(value: int) -> int:
    """Wrap around to a signed 8-byte word."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
