"""Running the two sides of a handshake: the acceptor's on the I/O thread, the dialer's in the caller's."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from monarch.runtime.transport.handshake import HandshakeFailed, Read, Steps, Write
from monarch.runtime.transport.interface import Check
from monarch.runtime.transport.loop import Loop
from monarch.runtime.transport.streams import Stream

_log = logging.getLogger("monarch.transport")
_SLICE_MS = 50


class Greeting:
    """A connection that has been accepted, until it is a link or is dropped. It holds some hundred bytes, and no
    longer than `patience` seconds."""

    def __init__(
        self,
        loop: Loop,
        stream: Stream,
        steps: Steps,
        who: str,
        patience: float,
        ended: Callable[[Greeting, Any], None],
    ) -> None:
        self.stream = stream
        self._loop = loop
        self._steps = steps
        self._who = who
        self._ended = ended
        self._data = bytearray()
        self._want = 0
        self._over = False
        self._shaking = isinstance(stream.socket, ssl.SSLSocket)
        self._timer = loop.later(patience, lambda: self.drop(f"it was silent for {patience:g} s"))
        self._step(None)
        if not self._over:
            loop.watch(stream.fileno(), select.EPOLLIN, self._ready, lambda error: self.drop(repr(error)))

    def drop(self, why: str) -> None:
        """Give the connection up, and say so in the log."""
        if not self._over:
            _log.warning("dropped a connection from %s: %s", self._who, why)
            self._end(None)
            self._steps.close()
            self.stream.close()

    def _end(self, result: Any) -> None:
        self._over = True
        self._timer.cancel()
        self._loop.unwatch(self.stream.fileno())
        self._ended(self, result)

    def _ready(self, events: int) -> None:
        try:
            if self._shaking:
                self._shake()
            # Bytes that TLS has decrypted already would not wake the loop again, so read until there are no more.
            while not self._over and not self._shaking:
                piece = bytearray(self._want - len(self._data))
                size = self.stream.receive(memoryview(piece))
                if size == 0:
                    self.drop("it closed the connection during the handshake")
                    return
                self._data += piece[:size]
                if len(self._data) == self._want:
                    data, self._data = bytes(self._data), bytearray()
                    self._step(data)
        except BlockingIOError:
            pass
        except (OSError, HandshakeFailed) as error:
            self.drop(str(error))

    def _shake(self) -> None:
        sock = self.stream.socket
        assert isinstance(sock, ssl.SSLSocket)
        wanted = select.EPOLLIN
        try:
            sock.do_handshake()
            self._shaking = False
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            wanted = select.EPOLLOUT
        self._loop.change(self.stream.fileno(), wanted)

    def _step(self, data: bytes | None) -> None:
        """Go on to where more is to be read."""
        try:
            step = next(self._steps) if data is None else self._steps.send(data)
            while isinstance(step, Write):
                # The socket's buffer is empty, for the other side has waited for this: if the message does not fit,
                # nobody reads.
                if _send(self.stream, step) != len(step.data):
                    raise HandshakeFailed("it does not read its messages")
                step = next(self._steps)
            self._want = step.size
        except StopIteration as end:
            self._end(end.value)


def drive(steps: Steps, stream: Stream, deadline: float, check: Check | None) -> Any:
    """Run the dialer's side of a handshake. Raises OSError, HandshakeFailed, TimeoutError, and what `check` does."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Read):
                data = bytearray(step.size)
                view = memoryview(data)
                while view:
                    size = _patiently(partial(stream.receive, view), stream, select.POLLIN, deadline, check)
                    if size == 0:
                        raise HandshakeFailed("it closed the connection")
                    view = view[size:]
                step = steps.send(bytes(data))
            else:
                sent = _patiently(partial(_send, stream, step), stream, select.POLLOUT, deadline, check)
                rest = memoryview(step.data)[sent:]
                while rest:
                    rest = rest[_patiently(partial(stream.send, [rest]), stream, select.POLLOUT, deadline, check) :]
                step = next(steps)
    except StopIteration as end:
        return end.value


def connected(sock: socket.socket, deadline: float, check: Check | None) -> None:
    """Wait until a connection is made, or was refused."""
    wait(sock.fileno(), select.POLLOUT, deadline, check)
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, "")


def shake(sock: ssl.SSLSocket, deadline: float, check: Check | None) -> None:
    """The client's side of a TLS handshake."""
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            wait(sock.fileno(), select.POLLIN, deadline, check)
        except ssl.SSLWantWriteError:
            wait(sock.fileno(), select.POLLOUT, deadline, check)


def wait(fd: int, events: int, deadline: float, check: Check | None) -> None:
    poll = select.poll()
    poll.register(fd, events)
    while True:
        if check is not None:
            check()
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if poll.poll(min(_SLICE_MS, left * 1000)):
            return


def _patiently(call: Callable[[], int], stream: Stream, events: int, deadline: float, check: Check | None) -> int:
    while True:
        try:
            return call()
        except BlockingIOError:
            wait(stream.fileno(), events, deadline, check)


def _send(stream: Stream, step: Write) -> int:
    return stream.send_files([step.data], step.files) if step.files else stream.send([step.data])
