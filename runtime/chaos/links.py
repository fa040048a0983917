"""A link with faults on demand: between a controller and a host, or any two processes that speak TCP."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_PIECE = 64 << 10
_LINGER = struct.pack("ii", 1, 0)


class Link:
    """Passes bytes on between processes that connect to `address` and the one at `to` ("10.0.0.1:4242").

        with chaos.Link("10.0.0.1:4242") as link:
            hosts = monarch.hosts(link.address, ...)
            link.delay = 0.2

    `delay` is how many seconds everything takes longer, either way. Certificates that name the host do not name
    `address`, which is one of this machine's: use the link with a token.
    """

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = host.strip("[]"), int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay = 0.0
        self.spoil: Callable[[bytes], bytes] | None = None
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="chaos link", daemon=True).start()

    def cut(self) -> None:
        """Both ends find their connections reset. New ones can be made."""
        with self._lock:
            ends, self._ends, self._forgotten = [*self._ends, *self._forgotten], [], set()
        for end in ends:
            with suppress(OSError):  # closed by the other end's close
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
                end.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """No bytes come through the open connections any more, without an error. New ones can be made."""
        with self._lock:
            self._forgotten |= set(self._ends)
            self._ends = []

    def hold(self) -> None:
        """No bytes come through any more, without an error, until `let_go`: then all of them come."""
        self._flows.clear()

    def let_go(self) -> None:
        """The delayed bytes come through."""
        self._flows.set()

    def drop(self) -> None:
        """The next bytes, either way, are lost."""
        self.spoil = lambda data: b""

    def corrupt(self) -> None:
        """Of the next bytes, either way, one bit in the middle is turned."""
        self.spoil = lambda data: (
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        )

    def close(self) -> None:
        """Cut it, and take no connections any more."""
        self._closed = True
        self._listener.close()
        self.let_go()
        self.cut()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends += near, far
            for source, target in ((near, far), (far, near)):
                arguments = (source, target)
                threading.Thread(target=self._pass_on, args=arguments, name="chaos link", daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(_PIECE):
                if source in self._forgotten:
                    continue
                self._flows.wait()
                time.sleep(self.delay)
                spoil, self.spoil = self.spoil, None
                target.sendall(data if spoil is None else spoil(data))
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one end has closed it, or it was cut
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)
                target.shutdown(socket.SHUT_RDWR)
