"""A connection between processes of two hosts, both ways: messages as frames over TCP, with TLS or without.

A frame is the length of a packet (4 bytes), the packet, and the large parts of the message, whose sizes the packet has.
The receiver reads those into memory of its own, or, where it hands them on, into a file. Nothing is unpickled before
the other end has proved to know the job's secret: a link is joined to its socket only then (`network`), and what is
sent before waits.
"""

from __future__ import annotations

import pickle
import select
import struct
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from monarch.runtime.actors.messages.memory import MessageMemory, room
from monarch.runtime.actors.messages.message import EMPTY, PACKET, Payload, lost
from monarch.runtime.actors.messages.protocol import Head, passed_on
from monarch.runtime.transport.streams import Stream

_LENGTH = struct.Struct("!I")
_BUFFERS_AT_ONCE = 16
_RECEIVES_AT_ONCE = 32
_FLUSH_SECONDS = 1.0
_CHUNK = 1 << 20


class Loop(Protocol):
    """The part of the router that a link needs."""

    def watch(self, fd: int, handler: Callable[[int], None], events: int = ...) -> None: ...

    def change(self, fd: int, events: int) -> None: ...

    def forget(self, fd: int) -> None: ...

    def soon(self, task: Callable[[], None]) -> None: ...

    def later(self, seconds: float, ring: Callable[[], None]) -> None: ...


class Link:
    """`deliver(peer, head, payload)` is called with each message, in the I/O thread, `lost(link, why)` at the end."""

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
        """Functions to call in the I/O thread once it is over."""
        self._loop = loop
        self._deliver = deliver
        self._lost = lost
        self._lock = threading.Lock()
        self._outbox: deque[tuple[memoryview, Payload]] = deque()
        self._joined = threading.Event()
        self.stream: Stream | None = None
        self._waits = False  # for the socket to take more
        self._buffer = memoryview(bytearray(_LENGTH.size + PACKET))
        self._end = 0  # of what is in the buffer
        self._parts: deque[memoryview] = deque()  # what is missing of the message that is coming
        self._coming: tuple[Head, Payload] = (), EMPTY

    # -- sending: from any thread --------------------------------------------------------------------------------------

    def send(self, head: Head, payload: Payload) -> bool:
        """Send, without waiting; False where the link has ended."""
        packet = pickle.dumps((head, payload.data, payload.sizes, payload.lent), 5)
        parts = payload.views()
        with self._lock:
            if not self.open:
                return False
            self._outbox.append((memoryview(_LENGTH.pack(len(packet)) + packet), payload))
            self._outbox.extend((part, payload) for part in parts)
            if self.stream is not None and not self._waits:
                self._push(self.stream)
        return True

    def _push(self, stream: Stream) -> None:
        """Send as much as the socket takes; the I/O thread sends the rest. With the lock held."""
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
        stream = self.stream
        while stream is not None and self._outbox and self.open:
            _, writable, _ = select.select([], [stream], [], _FLUSH_SECONDS)
            if not writable:
                return
            with self._lock:
                self._push(stream)

    # -- its beginning and its end -------------------------------------------------------------------------------------

    def join(self, stream: Stream) -> None:
        """The other end has proved its identity. From any thread."""
        with self._lock:
            if self.over:
                stream.close()
                return
            self.stream = stream
            self._loop.watch(stream.fileno(), self.ready)
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
        self._loop.soon(lambda: self._end_with(why))

    def close(self) -> None:
        """Send nothing more, and have the connection end. From any thread."""
        with self._lock:
            self.open = False
            self._outbox.clear()
            if self.stream is not None:
                self.stream.shutdown()

    def finish(self) -> None:
        """The peer has ended, and its end of the connection is not heard of: take no more. In the I/O thread."""
        self._end_with("its process has ended")

    def _end_with(self, why: str) -> None:
        if self.over:
            return
        self.over = True
        with self._lock:
            self.open = False
            self._outbox.clear()
            if self.stream is not None:
                self._loop.forget(self.stream.fileno())
                self.stream.close()
        for task in self.then:
            task()
        self._lost(self, why)

    # -- the I/O thread ------------------------------------------------------------------------------------------------

    def ready(self, events: int) -> None:
        assert self.stream is not None
        if events & select.EPOLLOUT:
            with self._lock:
                self._push(self.stream)
        if events & ~select.EPOLLOUT:
            self._receive(self.stream)

    def _receive(self, stream: Stream) -> None:
        """Read some of the bytes that have arrived, so that one sender does not keep the others waiting."""
        for _ in range(_RECEIVES_AT_ONCE):
            if self.over:
                return
            target = self._parts[0] if self._parts else self._buffer[self._end :]
            try:
                size = stream.receive(target)
            except BlockingIOError:
                return
            except OSError as error:
                self._end_with(f"the connection broke: {error.strerror or error}")
                return
            if not size:
                self._end_with("it closed the connection")
                return
            if self._parts:
                self._filled(size)
            else:
                self._end += size
                self._frames()
            if size < len(target) and not stream.greedy:
                return  # there was no more
        if stream.greedy:
            self._loop.soon(lambda: self._receive(stream))

    def _frames(self) -> None:
        """Take the frames that have come out of the buffer."""
        begin, end = 0, self._end
        while not self._parts and end - begin >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, begin)
            if not 0 < size <= PACKET:
                self._end_with(f"it sent a packet of {size} bytes, and {PACKET} are the most")
                return
            packet = begin + _LENGTH.size
            if end < packet + size:
                break
            begin = packet + size
            head, data, sizes, lent = pickle.loads(self._buffer[packet:begin])
            payload = Payload(data, sizes)
            payload.lent = lent
            if not sizes:
                self._deliver(self.peer, head, payload)
                continue
            try:
                if passed_on(head):
                    payload.memory, parts = MessageMemory.room(sizes)
                else:
                    parts = room(sizes)
                payload.parts = parts
            except OSError as error:
                told = OSError(error.errno, f"no room for a message of {sum(sizes)} bytes: {error.strerror}")
                payload, parts = lost(told), _skipped(sum(sizes))
                payload.lent = lent
            self._coming = head, payload
            self._parts.extend(parts)
            while self._parts and begin < end:
                part = self._parts[0]
                size = min(len(part), end - begin)
                part[:size] = self._buffer[begin : begin + size]
                begin += size
                self._filled(size)
        self._buffer[: end - begin] = self._buffer[begin:end]
        self._end = end - begin

    def _filled(self, size: int) -> None:
        """So many bytes of the next large part have arrived."""
        part = self._parts.popleft()
        if size < len(part):
            self._parts.appendleft(part[size:])
        if not self._parts:
            head, payload = self._coming
            self._coming = (), EMPTY
            self._deliver(self.peer, head, payload)


def _skipped(size: int) -> list[memoryview]:
    """Where to read so many bytes that nobody wants."""
    chunk = memoryview(bytearray(min(size, _CHUNK)))
    return [chunk[: min(size - at, _CHUNK)] for at in range(0, size, _CHUNK)]
