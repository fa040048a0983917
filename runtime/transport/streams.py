"""Sockets as links use them: non-blocking, one sender at a time and one receiver at a time, file descriptors where the
socket can carry them."""

from __future__ import annotations

import array
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch.runtime.transport.interface import Address, LinkLost
from monarch.runtime.transport.loop import Loop
from monarch.runtime.transport.regions import Regions

_FILES = 16  # descriptors in one message
_ANCILLARY = socket.CMSG_SPACE(_FILES * array.array("i").itemsize)
_RECORD = 16 << 10  # what TLS encrypts at once
_TLS_PIECE = 256 << 10  # what is encrypted before others get at the connection


@dataclass(frozen=True)
class Ends:
    """The part of a link that is the same for all transports: its peer, and the parts of this process that it uses.

    `messages`  handshake messages sent so far
    `ended`     called with the link and the reason when it ends, on the I/O thread
    """

    peer: Address
    loop: Loop
    regions: Regions
    messages: int
    ended: Callable[[Any, LinkLost], None]


Buffers = Sequence[bytes | bytearray | memoryview]


class Stream:
    """A connected TCP socket without TLS, and the base of the other kinds.

    `send(buffers)` and `receive(view)` give the bytes that went through, and raise BlockingIOError where none can;
    `receive` gives 0 at the end. `receive_rest` is `receive` for bytes that carry no files.
    """

    kind = "tcp"
    greedy = False
    """Whether more may be readable although the socket does not say so: read until it would block."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._ends: Ends | None = None
        self.files: deque[int] = deque()
        self.send: Callable[[Buffers], int] = sock.sendmsg
        self.receive: Callable[[memoryview], int] = sock.recv_into
        self.receive_rest: Callable[[memoryview], int] = sock.recv_into

    @property
    def known(self) -> bool:
        """Whether the peer has named itself, and proved its identity."""
        return self._ends is not None

    @property
    def ends(self) -> Ends:
        """Known once both sides have proved their identity."""
        assert self._ends is not None
        return self._ends

    @ends.setter
    def ends(self, ends: Ends) -> None:
        self._ends = ends

    def fileno(self) -> int:
        return self.socket.fileno()

    def send_files(self, buffers: Buffers, files: Sequence[int]) -> int:
        raise OSError(f"file descriptors do not travel over a {self.kind} socket")

    def shutdown(self) -> None:
        """Both directions, also for other threads that use it now. The descriptor stays."""
        try:
            # Not the method of an SSLSocket, which would forget that it is one.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone already

    def close(self) -> None:
        while self.files:
            os.close(self.files.popleft())
        self.socket.close()


class LocalStream(Stream):
    """A Unix socket, which carries files. They arrive with the first byte of the message that they were sent with."""

    kind = "local"

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.receive = self._receive

    def send_files(self, buffers: Buffers, files: Sequence[int]) -> int:
        return self.socket.sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])

    def _receive(self, view: memoryview) -> int:
        size, ancillary, _, _ = self.socket.recvmsg_into([view], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files = array.array("i")
                files.frombytes(data[: len(data) // files.itemsize * files.itemsize])
                self.files.extend(files)
        return size

    def credentials(self) -> tuple[int, int]:
        """Process and user at the other end, as the kernel saw them when the connection was made."""
        data = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = array.array("i", data)
        return pid, uid


class TlsStream(Stream):
    """A TCP socket under TLS. OpenSSL takes one call at a time for a connection, so reading and writing take turns."""

    kind = "tls"
    greedy = True

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock
        self._turn = threading.Lock()
        self.send = self._send
        self.receive = self.receive_rest = self._receive

    def _send(self, buffers: Buffers) -> int:
        # A record for a header alone would cost as much as one for header and payload.
        first = memoryview(buffers[0])
        if len(buffers) > 1 and first.nbytes < _RECORD:
            joined = bytearray(first)
            for buffer in buffers[1:]:
                joined += memoryview(buffer)[: _RECORD - len(joined)]
                if len(joined) >= _RECORD:
                    break
            first = memoryview(joined)
        with self._turn:
            try:
                return self._tls.send(first[:_TLS_PIECE])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def _receive(self, view: memoryview) -> int:
        with self._turn:
            try:
                return self._tls.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None
            except ssl.SSLEOFError:
                return 0


def tune(sock: socket.socket, patience: float) -> None:
    """A TCP socket for links: no waiting to fill packets, and an end once the peer's kernel has been silent for
    `patience` seconds, whether bytes are under way or not."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, int(patience // 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience * 1000))
