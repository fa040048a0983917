"""Sockets between the processes of a host: one for each direction of each pair, so that what one process sends to
another arrives in the order sent.

Every process listens on an abstract Unix socket with a random name of 128 bits, its address. Who connects and who
accepts both ask the kernel for the other's user before a byte is read; nothing is unpickled from anyone else. The first
packet says who connects, the others are messages (`message`).

A message goes out in the thread that sends it, without blocking: what the socket does not take waits in an outbox,
which the one I/O thread empties. That thread receives everything, never blocks, and hands each message to `deliver`.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import sys
import threading
import traceback
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic

from monarch.runtime.actors.memory import Memory
from monarch.runtime.actors.message import PACKET, Payload, packet, unpack
from monarch.runtime.actors.protocol import Head

Deliver = Callable[[str, Head, Payload], None]
"""Called with the address of the sender, in the I/O thread, or in the sending one where a process sends to itself."""

_FILES = socket.CMSG_SPACE(4 * array("i").itemsize)
_CREDENTIALS = struct.Struct("3i")
_RECEIVES_AT_ONCE = 16
_FLUSH_SECONDS = 1.0
_LATER = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
"""The kernel has no room for the message, or for the files that are under way, until others have been read."""


def new_address() -> str:
    return secrets.token_hex(16)


def listen(address: str) -> socket.socket:
    """A socket at which `address` can be reached; the kernel keeps connections until somebody accepts them."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(_name(address))
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def _name(address: str) -> str:
    return f"\0monarch-{address}"


def is_ours(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


class _Way:
    """The connection on which this process sends to one other."""

    __slots__ = ("lock", "open", "outbox", "socket")

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.lock = threading.Lock()
        self.outbox: deque[tuple[bytes, Memory | None]] = deque()
        self.open = True

    def put(self, data: bytes, memory: Memory | None) -> bool:
        """Whether the socket took it. Raises OSError where the other end is gone. With the lock held."""
        try:
            if memory is None:
                self.socket.send(data)
            else:
                self.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory.fd]))])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _LATER:
                return False
            raise
        return True


class Router:
    """All of a process' connections, and the thread that serves them."""

    def __init__(self, address: str, listener: socket.socket, deliver: Deliver) -> None:
        self.address = address
        self._deliver = deliver
        self._listener = listener
        self._ways: dict[str, _Way | None] = {}
        self._connecting = threading.Lock()
        self._senders: dict[str, socket.socket] = {}
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self._closed = False
        self.watch(listener.fileno(), self._accept)
        self.watch(self._wakeup, self._run_tasks)

    # -- sending: from any thread --------------------------------------------------------------------------------------

    def send(self, to: str, head: Head, payload: Payload) -> bool:
        """Send, without waiting. False where the receiver is known to be gone."""
        if to == self.address:
            self._deliver(to, head, payload.received())
            return True
        way = self._ways[to] if to in self._ways else self._connect(to)
        if way is None:
            return False
        data, memory = packet(head, payload), payload.memory
        with way.lock:
            if not way.open:
                return False
            try:
                if not way.outbox and way.put(data, memory):
                    return True
            except OSError:
                way.open = False
                return False
            way.outbox.append((data, memory))
            if len(way.outbox) == 1:
                self.watch(way.socket.fileno(), lambda _: self._flush(way), select.EPOLLOUT)
        return True

    def _connect(self, to: str) -> _Way | None:
        with self._connecting:
            if to in self._ways:
                return self._ways[to]
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            way: _Way | None = None
            try:
                connected.connect(_name(to))
                if is_ours(connected):
                    connected.send(self.address.encode())
                    connected.setblocking(False)
                    way = _Way(connected)
            except OSError:
                pass
            if way is None:
                connected.close()
            self._ways[to] = way
            return way

    def _flush(self, way: _Way) -> None:
        with way.lock:
            try:
                while way.outbox:
                    if not way.put(*way.outbox[0]):
                        return
                    way.outbox.popleft()
            except OSError:
                way.open = False
                way.outbox.clear()
            if not way.outbox:
                self.forget(way.socket.fileno())

    def gone(self, address: str) -> None:
        """A process has ended: nothing can be sent to it any more."""
        with self._connecting:
            way = self._ways.get(address)
            self._ways[address] = None
        if way is not None:
            with way.lock:
                way.open = False
                if way.outbox:
                    way.outbox.clear()
                    self.forget(way.socket.fileno())
                way.socket.close()

    # -- the I/O thread ------------------------------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Have the I/O thread call `handler` with the events of a file. From any thread."""
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def soon(self, task: Callable[[], None]) -> None:
        """Have the I/O thread call it. From any thread."""
        self._tasks.append(task)
        with self._waking, suppress(BlockingIOError):
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def drain(self, sender: str) -> None:
        """Take in all that a process that has ended had sent. In the I/O thread."""
        if sender in self._senders:
            self._receive(sender, self._senders[sender], sys.maxsize)

    def flush(self) -> None:
        """Wait until all that was sent has gone out, to those who still read."""
        for way in list(self._ways.values()):
            while way is not None and way.outbox and way.open:
                select.select([], [way.socket], [], _FLUSH_SECONDS)
                self._flush(way)

    def close(self) -> None:
        """End the I/O thread, and close everything."""
        self._closed = True
        self.soon(lambda: None)

    def _close(self) -> None:
        for way in self._ways.values():
            if way is not None:
                with way.lock:
                    way.open = False
                    way.socket.close()
        for connection in self._senders.values():
            connection.close()
        self._listener.close()
        self._poll.close()
        with self._waking:
            os.close(self._wakeup)
            self._wakeup = -1

    def start(self) -> None:
        """Serve in a thread of its own."""
        threading.Thread(target=self.serve, name="monarch actors i/o", daemon=True).start()

    def serve(self) -> None:
        """Until it is closed: this is the I/O thread."""
        try:
            self._loop()
        except BaseException:
            # Without it nobody would be answered, or hear of anything, ever again.
            traceback.print_exc()
            os._exit(1)
        self._close()

    def _loop(self) -> None:
        poll, handlers = self._poll.poll, self._handlers
        while not self._closed:
            for fd, events in poll(self._wait()):
                handler = handlers.get(fd)
                if handler is not None:
                    handler(events)
            if self._alarm is not None and monotonic() >= self._alarm[0]:
                _, ring = self._alarm
                self._alarm = None
                ring()

    def _wait(self) -> float | None:
        return None if self._alarm is None else max(0.0, self._alarm[0] - monotonic())

    def alarm(self, when: float, ring: Callable[[], None]) -> None:
        """Have the I/O thread call it at a time of the monotonic clock. In the I/O thread; there is one alarm."""
        self._alarm = when, ring

    def _run_tasks(self, _: int) -> None:
        os.eventfd_read(self._wakeup)
        while self._tasks:
            self._tasks.popleft()()

    def _accept(self, _: int) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                if is_ours(connection):
                    connection.setblocking(False)
                    self.watch(connection.fileno(), partial(self._hello, connection))
                else:
                    connection.close()

    def _hello(self, connection: socket.socket, _: int) -> None:
        """The first packet of a connection: the sender's address."""
        try:
            address = connection.recv(64).decode("ascii", "replace")
        except BlockingIOError:
            return
        except ConnectionError:
            address = ""
        if not address or address in self._senders:
            self.forget(connection.fileno())
            connection.close()
            return
        self._senders[address] = connection
        self._handlers[connection.fileno()] = lambda _: self._receive(address, connection, _RECEIVES_AT_ONCE)

    def _receive(self, sender: str, connection: socket.socket, most: int) -> None:
        """Take in some of what has come, so that one sender does not keep the others waiting."""
        for _ in range(most):
            try:
                data, ancillary, _, _ = connection.recvmsg(PACKET, _FILES)
            except BlockingIOError:
                return
            except ConnectionError:
                data, ancillary = b"", []
            if not data:
                self.forget(connection.fileno())
                del self._senders[sender]
                connection.close()
                return
            files: array[int] = array("i")
            for _, _, fds in ancillary:
                files.frombytes(fds)
            self._deliver(sender, *unpack(data, files))
