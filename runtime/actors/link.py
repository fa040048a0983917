"""A connection between processes of two hosts, both ways: messages as frames over TCP, with TLS or without.

A frame is the length of a packet (4 bytes), the packet, and the large parts of the message, whose sizes the packet has.
The receiver reads those into memory of its own. Nothing is unpickled before the other end has proved to know the job's
secret: a link is joined to its socket only then (`network`), and what is sent before waits.
"""

from __future__ import annotations

import mmap
import pickle
import select
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from monarch.runtime.actors.message import PACKET, Payload
from monarch.runtime.actors.protocol import Head
from monarch.runtime.transport.streams import Stream

_LENGTH = struct.Struct("!I")
_BUFFERS_AT_ONCE = 16
_RECEIVES_AT_ONCE = 32
_ALIGNMENT = 64
_FLUSH_SECONDS = 1.0


class Loop(Protocol):
    """What of the router a link needs."""

    def watch(self, fd: int, handler: Callable[[int], None], events: int = ...) -> None: ...

    def change(self, fd: int, events: int) -> None: ...

    def forget(self, fd: int) -> None: ...

    def soon(self, task: Callable[[], None]) -> None: ...


class Link:
    """`deliver(peer, head, payload)` is called with what comes, in the I/O thread, `lost(link, why)` at the end."""

    def __init__(
        self,
        peer: str,
        loop: Loop,
        deliver: Callable[[str, Head, Payload], None],
        lost: Callable[[Link, str], None],
    ) -> None:
        self.peer = peer
        self.open = True
        self.over = False
        """Whether all that the peer sent has been delivered, and it cannot send more."""
        self.then: list[Callable[[], None]] = []
        """What is to be done in the I/O thread once it is over."""
        self._loop = loop
        self._deliver = deliver
        self._lost = lost
        self._lock = threading.Lock()
        self._outbox: deque[tuple[memoryview, Payload]] = deque()
        self._joined = threading.Event()
        self._stream: Stream | None = None
        self._waits = False  # for the socket to take more
        self._target = memoryview(bytearray(_LENGTH.size))  # what is being read
        self._rest = self._target
        self._take: Callable[[], None] = self._length
        self._coming: tuple[Head, bytes | None, tuple[int, ...], list[memoryview]] = ((), None, (), [])

    # -- sending: from any thread --------------------------------------------------------------------------------------

    def send(self, head: Head, payload: Payload) -> bool:
        """Send, without waiting; False where the link has ended."""
        packet = pickle.dumps((head, payload.data, payload.sizes), 5)
        parts = payload.views()
        with self._lock:
            if not self.open:
                return False
            self._outbox.append((memoryview(_LENGTH.pack(len(packet)) + packet), payload))
            self._outbox.extend((part, payload) for part in parts)
            if self._stream is not None and not self._waits:
                self._push(self._stream)
        return True

    def _push(self, stream: Stream) -> None:
        """Send what the socket takes; the I/O thread sends the rest. With the lock held."""
        outbox = self._outbox
        try:
            while outbox:
                sent = stream.send([part for part, _ in islice(outbox, _BUFFERS_AT_ONCE)])
                while sent:
                    part, payload = outbox[0]
                    if sent < len(part):
                        outbox[0] = part[sent:], payload
                        break
                    outbox.popleft()
                    sent -= len(part)
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
            outbox.clear()
            stream.shutdown()  # the I/O thread reads what had come before, and then says why
        if self.open and bool(outbox) != self._waits:
            self._waits = bool(outbox)
            self._loop.change(stream.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._waits else 0))

    def flush(self) -> None:
        """Wait until all has gone out, if the other end reads."""
        self._joined.wait(_FLUSH_SECONDS)
        stream = self._stream
        while stream is not None and self._outbox and self.open:
            _, writable, _ = select.select([], [stream], [], _FLUSH_SECONDS)
            if not writable:
                return
            with self._lock:
                self._push(stream)

    # -- its beginning and its end -------------------------------------------------------------------------------------

    def join(self, stream: Stream) -> None:
        """The other end has proved who it is. From any thread."""
        with self._lock:
            if self.over:
                stream.close()
                return
            self._stream = stream
            self._loop.watch(stream.fileno(), self._ready)
            if self.open:
                self._push(stream)
            else:
                stream.shutdown()
        self._joined.set()

    def fail(self, why: str) -> None:
        """There will be no connection. From any thread."""
        with self._lock:
            self.open = False
            self._outbox.clear()
        self._joined.set()
        self._loop.soon(lambda: self._end(why))

    def close(self) -> None:
        """Send nothing more, and have the connection end. From any thread."""
        with self._lock:
            self.open = False
            self._outbox.clear()
            if self._stream is not None:
                self._stream.shutdown()

    def finish(self) -> None:
        """The peer has ended, and its end of the connection is not heard of: take no more. In the I/O thread."""
        self._end("its process has ended")

    def _end(self, why: str) -> None:
        if self.over:
            return
        self.over = True
        with self._lock:
            self.open = False
            self._outbox.clear()
            if self._stream is not None:
                self._loop.forget(self._stream.fileno())
                self._stream.close()
        for task in self.then:
            task()
        self._lost(self, why)

    # -- the I/O thread ------------------------------------------------------------------------------------------------

    def _ready(self, events: int) -> None:
        assert self._stream is not None
        if events & select.EPOLLOUT:
            with self._lock:
                self._push(self._stream)
        if events & ~select.EPOLLOUT:
            self._receive(self._stream)

    def _receive(self, stream: Stream) -> None:
        """Take in some of what has come, so that one sender does not keep the others waiting."""
        for _ in range(_RECEIVES_AT_ONCE):
            if self.over:
                return
            try:
                size = stream.receive(self._rest)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"the connection broke: {error.strerror or error}")
                return
            if not size:
                self._end("it closed the connection")
                return
            self._rest = self._rest[size:]
            if not self._rest:
                self._take()
        if stream.greedy:
            self._loop.soon(lambda: self._receive(stream))

    def _read(self, target: memoryview, take: Callable[[], None]) -> None:
        """`take` is to be called once this is full."""
        self._target = self._rest = target
        self._take = take

    def _length(self) -> None:
        (size,) = _LENGTH.unpack(self._target)
        if not 0 < size <= PACKET:
            self._end(f"it sent a packet of {size} bytes, and {PACKET} are the most")
            return
        self._read(memoryview(bytearray(size)), self._packet)

    def _packet(self) -> None:
        head, data, sizes = pickle.loads(self._target)
        parts = _room(sizes) if sizes else []
        self._coming = head, data, sizes, parts
        self._part(0)

    def _part(self, number: int) -> None:
        head, data, sizes, parts = self._coming
        if number < len(parts):
            self._read(parts[number], lambda: self._part(number + 1))
            return
        self._coming = (), None, (), []
        self._read(memoryview(bytearray(_LENGTH.size)), self._length)
        self._deliver(self.peer, head, Payload(data, sizes, None, parts or None))


def _room(sizes: Sequence[int]) -> list[memoryview]:
    """Memory for the parts of a message, until nothing refers to any of them."""
    places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    whole: Any = memoryview(mmap.mmap(-1, sum(places)))
    parts, at = [], 0
    for size, place in zip(sizes, places, strict=True):
        parts.append(whole[at : at + size])
        at += place
    return parts
