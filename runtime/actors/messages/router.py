"""Sockets between the processes of a host: one for each direction of each pair, so that what one process sends to
another arrives in the order sent. For processes of other hosts see `network`.

Every process listens on an abstract Unix socket with a random name of 128 bits, its address. Both ends of a connection
ask the kernel for the other's user before they read a byte; nothing is unpickled from another user. The first packet
names the process that connects, the others are messages (`message`).

A message goes out in the thread that sends it, without blocking: what the socket does not take waits in an outbox,
which the one I/O thread empties. That thread receives everything, never blocks, and hands each message to `deliver`.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import sys
import threading
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import Any

from monarch.runtime.actors.messages.address import LONGEST, host_of, name_of
from monarch.runtime.actors.messages.memory import MessageMemory
from monarch.runtime.actors.messages.message import EMPTY, PACKET, Files, Payload, packet, unpack
from monarch.runtime.actors.messages.network import Network, Way, refuse
from monarch.runtime.actors.messages.order import Numbers
from monarch.runtime.actors.messages.protocol import NUMBERED, UNSENT, Head
from monarch.runtime.actors.messages.recent import Recent

Deliver = Callable[[str, Head, Payload], None]
"""Called with the address of the sender, in the I/O thread, or in the sending one where a process sends to itself."""

_log = logging.getLogger("monarch.actors")

_FILES = socket.CMSG_SPACE(4 * array("i").itemsize)
_CREDENTIALS = struct.Struct("3i")
_RECEIVES_AT_ONCE = 16
_FLUSH_SECONDS = 1.0
_PAUSE = 0.5
_HANDED = b"+"
"""Instead of an address: with a connection from another host."""
_LATER = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
"""The kernel has no room for the message, or for the files that are under way, until others have been read."""


def listen(address: str) -> socket.socket:
    """A socket at which `address` can be reached; the kernel keeps connections until somebody accepts them."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(_name(address))
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def _name(address: str) -> str:
    return f"\0monarch-{name_of(address)}"


def hand_over(connection: socket.socket, to: str) -> None:
    """Give a process of this host a connection that somebody on another host has made to it. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as process:
        process.connect(_name(to))
        if not is_ours(process):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        process.sendmsg([_HANDED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [connection.fileno()]))])


def is_ours(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


class _Way:
    """The connection on which this process sends to one other."""

    __slots__ = ("_router", "lock", "open", "outbox", "socket")

    def __init__(self, connected: socket.socket, router: Router) -> None:
        self._router = router
        self.socket = connected
        self.lock = threading.Lock()
        self.outbox: deque[tuple[bytes, MessageMemory | Files | None]] = deque()
        self.open = True

    def send(self, head: Head, payload: Payload) -> bool:
        data, files = packet(head, payload), payload.memory or payload.files
        with self.lock:
            if not self.open:
                return False
            try:
                if not self.outbox and self._put(data, files):
                    return True
            except OSError:
                self.open = False
                return False
            self.outbox.append((data, files))
            if len(self.outbox) == 1:
                self._router.watch(self.socket.fileno(), self._flush, select.EPOLLOUT)
        return True

    def _flush(self, _: int = 0) -> None:
        with self.lock:
            try:
                while self.outbox:
                    if not self._put(*self.outbox[0]):
                        return
                    self.outbox.popleft()
            except OSError:
                self.open = False
                self.outbox.clear()
            if not self.outbox:
                self._router.forget(self.socket.fileno())

    def flush(self) -> None:
        """Wait until all has gone out, if the other end reads."""
        while self.outbox and self.open:
            select.select([], [self.socket], [], _FLUSH_SECONDS)
            self._flush()

    def close(self) -> None:
        """Send nothing more."""
        with self.lock:
            self.open = False
            if self.outbox:
                self.outbox.clear()
                self._router.forget(self.socket.fileno())
            self.socket.close()

    def _put(self, data: bytes, files: MessageMemory | Files | None) -> bool:
        """Whether the socket took it. Raises OSError where the other end is gone. With the lock held."""
        try:
            if files is None:
                self.socket.send(data)
            else:
                self.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files.fds))])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _LATER:
                return False
            raise
        return True


class _Numbered:
    """The way to a process of another host, which need not be the only one that is taken."""

    def __init__(self, way: Way, number: Callable[[], int]) -> None:
        self._way = way
        self._number = number

    def send(self, head: Head, payload: Payload) -> bool:
        number = self._number()
        try:
            return self._way.send((NUMBERED, number, head), payload)
        except BaseException:  # no more files, say, or ^C: what is sent later would wait for this number for ever
            self._way.send((NUMBERED, number, (UNSENT,)), EMPTY)
            raise

    def flush(self) -> None:
        self._way.flush()

    def close(self) -> None:
        self._way.close()


class Router:
    """All of a process' connections, and the thread that serves them."""

    def __init__(
        self,
        address: str,
        listener: socket.socket,
        deliver: Deliver,
        relay: str | None = None,
        lost: Callable[[str, str], None] = lambda address, why: None,
    ) -> None:
        """`relay` and `lost`: see `Network`."""
        self.address = address
        self._host = host_of(address)
        self.numbers = Numbers()
        """Of what goes to processes of other hosts."""
        self.network = Network(address, relay, self, self.send, deliver, lost)
        self._deliver = deliver
        self._listener = listener
        self._ways: dict[str, Way] = {}
        self._unreached: set[str] = set()
        self._ended: Recent[str, None] = Recent()
        self._connecting = threading.Lock()
        self._senders: dict[str, socket.socket] = {}
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._closed = False
        self.broken: Callable[[], None] = lambda: os._exit(1)
        """Called where the I/O thread has failed."""
        self.watch(listener.fileno(), self._accept)
        self.watch(self._wakeup, self._run_tasks)

    # -- sending: from any thread --------------------------------------------------------------------------------------

    def send(self, to: str, head: Head, payload: Payload) -> bool:
        """Send, without waiting. False where the receiver is known to be gone."""
        if to == self.address:
            self._deliver(to, head, payload.received())
            return True
        way = self._ways.get(to) or self._connect(to)
        return way is not None and way.send(head, payload)

    def _connect(self, to: str) -> Way | None:
        with self._connecting:
            if to in self._ways:
                return self._ways[to]
            if not self.reaches(to):
                return None
            if host_of(to) != self._host:
                found = self.network.way(to)
                if found is None:  # there may be one later
                    return None
                self._ways[to] = numbered = _Numbered(found, self.numbers.to(to))
                return numbered
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            way, hello = _Way(connected, self), self.address.encode()
            try:
                connected.connect(_name(to))
                if is_ours(connected):
                    connected.setblocking(False)
                    with way.lock:  # before anything else is sent on it
                        # Nothing comes between the two: a receiver that has heard of this process, whose connection
                        # Ctrl-C then closed, would take it for ended.
                        self._ways[to] = way
                        connected.send(hello)
                    return way
            except OSError:
                self._ways.pop(to, None)
            way.close()
            self._ended[to] = None
            return None

    def reaches(self, to: str) -> bool:
        """Whether it is not known that nothing can be sent there."""
        return to not in self._unreached and to not in self._ended

    @property
    def peers(self) -> list[str]:
        """The processes that something was sent to, and that are not known to be gone."""
        return list(self._ways)

    def gone(self, address: str, ended: bool = True) -> None:
        """A process has `ended`, or there is no way to it: nothing is sent to it any more."""
        with self._connecting:
            way = self._ways.pop(address, None)
            if ended:
                self._ended[address] = None
            else:
                self._unreached.add(address)
        self.numbers.gone(address)
        if host_of(address) != self._host:
            self.network.gone(address, ended)
        if way is not None:
            way.close()

    # -- the I/O thread ------------------------------------------------------------------------------------------------

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Have the I/O thread call `handler` with the events of a file. From any thread."""
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Have its handler called with other events."""
        self._poll.modify(fd, events)

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError):  # it was closed meanwhile, as at the program's end: the poll has forgotten it
                self._poll.unregister(fd)

    def soon(self, task: Callable[[], None]) -> None:
        """Have the I/O thread call it. From any thread."""
        self._tasks.append(task)
        with self._waking, suppress(BlockingIOError):
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def after_last(self, sender: str, task: Callable[[], None], seconds: float) -> None:
        """Call `task` once all that a process that has ended had sent is taken in; where that was on another host, it
        is waited for at most so long. In the I/O thread."""
        if sender in self._senders:
            self._receive(sender, self._senders[sender], sys.maxsize)
        self.network.after_last(sender, task, seconds)

    @property
    def closed(self) -> bool:
        return self._closed

    def flush(self) -> None:
        """Wait until all messages so far have gone out, to the processes that still read."""
        for way in list(self._ways.values()):
            way.flush()

    def close(self) -> None:
        """End the I/O thread, and close everything."""
        self._closed = True
        self.soon(lambda: None)

    def _close(self) -> None:
        for way in self._ways.values():
            way.close()
        self.network.close()
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
            self.broken()
        self._close()

    def _loop(self) -> None:
        poll, handlers = self._poll.poll, self._handlers
        while not self._closed:
            for fd, events in poll(self._wait()):
                handler = handlers.get(fd)
                if handler is not None:
                    handler(events)
            while self._alarms and monotonic() >= self._alarms[0][0]:
                heappop(self._alarms)[2]()

    def _wait(self) -> float | None:
        return max(0.0, self._alarms[0][0] - monotonic()) if self._alarms else None

    def later(self, seconds: float, ring: Callable[[], None]) -> None:
        """Have the I/O thread call it after so long. From any thread."""
        alarm = monotonic() + seconds, next(self._order), ring
        self.soon(lambda: heappush(self._alarms, alarm))

    def _run_tasks(self, _: int) -> None:
        os.eventfd_read(self._wakeup)
        while self._tasks:
            self._tasks.popleft()()

    def _accept(self, _: int) -> None:
        for connection, _ in self.accepted(self._listener, self._accept):
            if is_ours(connection):
                connection.setblocking(False)
                self.watch(connection.fileno(), partial(self._hello, connection))
            else:
                connection.close()

    def accepted(self, listener: socket.socket, handler: Callable[[int], None]) -> Iterator[tuple[socket.socket, Any]]:
        """The connections that wait at a listener, whose `handler` this is. Where none can be accepted, as when no
        descriptor is left, they wait in the kernel for a while. In the I/O thread."""
        try:
            while True:
                yield listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("cannot accept connections for %g s: %s", _PAUSE, error.strerror)
        self.forget(listener.fileno())
        self.later(_PAUSE, lambda: None if listener.fileno() < 0 else self.watch(listener.fileno(), handler))

    def _hello(self, connection: socket.socket, _: int) -> None:
        """The first packet of a connection: the sender's address, or a connection from another host."""
        files: list[int] = []
        try:
            data, files, _, _ = socket.recv_fds(connection, LONGEST, 1)
            address = data.decode("ascii", "replace")
        except BlockingIOError:
            return
        except ConnectionError:
            address = ""
        for fd in files:
            handed = socket.socket(fileno=fd)
            try:
                threading.Thread(target=self.network.admit, args=(handed,), name="monarch admit", daemon=True).start()
            except RuntimeError as error:
                refuse(handed, str(error))
        if files or data == _HANDED or not address or address in self._senders:
            self.forget(connection.fileno())
            connection.close()
            return
        self._senders[address] = connection
        self._handlers[connection.fileno()] = lambda _: self._receive(address, connection, _RECEIVES_AT_ONCE)

    def _receive(self, sender: str, connection: socket.socket, most: int) -> None:
        """Read some of the bytes that have arrived, so that one sender does not keep the others waiting."""
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
