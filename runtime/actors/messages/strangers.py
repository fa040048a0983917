"""Connections to a host whose other ends have not said yet which of its processes they want.

Each costs a descriptor, and no thread. There are so many at most that descriptors are left for everything else; the
oldest goes for a new one, and each after `SECONDS`. All of this happens in the router's I/O thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from time import monotonic

from monarch.runtime.actors.messages.network import SECONDS, WANTED_BYTES, refuse, wanted
from monarch.runtime.actors.messages.router import Router
from monarch.runtime.shared.descriptors import for_strangers
from monarch.runtime.transport.handshake import HandshakeFailed

_MOST = 256


class Strangers:
    """`usher(connection, name)` takes a connection over once its other end has named a process."""

    def __init__(self, listener: socket.socket, router: Router, usher: Callable[[socket.socket, str], None]) -> None:
        self._listener = listener
        self._router = router
        self._usher = usher
        self._most = for_strangers(_MOST)
        self._said: dict[socket.socket, tuple[float, bytes]] = {}
        """When each connection came, oldest first, and the bytes received from it."""
        self._looks = False
        """Whether an alarm is set to close connections that take too long."""
        router.watch(listener.fileno(), self._accept)

    def close(self) -> None:
        self._router.forget(self._listener.fileno())
        self._listener.close()
        for connection in list(self._said):
            self._let_go(connection)
            connection.close()

    def _accept(self, _: int) -> None:
        for connection, _ in self._router.accepted(self._listener, self._accept):
            if len(self._said) >= self._most:
                self._turn_away(next(iter(self._said)), "other connections came before it named its process")
            connection.setblocking(False)
            if not self._looks:
                self._looks = True
                self._router.later(SECONDS, self._look)
            self._said[connection] = monotonic(), b""
            self._router.watch(connection.fileno(), partial(self._hear, connection))

    def _look(self) -> None:
        """Close connections that have taken too long."""
        for connection, (since, _) in list(self._said.items()):
            if monotonic() - since >= SECONDS:
                self._turn_away(connection, f"it took longer than {SECONDS:g} s")
        self._looks = bool(self._said)
        if self._looks:
            since, _ = next(iter(self._said.values()))
            self._router.later(since + SECONDS - monotonic(), self._look)

    def _hear(self, connection: socket.socket, _: int) -> None:
        since, said = self._said[connection]
        try:
            data = connection.recv(WANTED_BYTES - len(said))
            if not data:
                raise HandshakeFailed("it closed the connection")
            name = wanted(said + data)
        except BlockingIOError:
            return
        except (OSError, HandshakeFailed) as error:
            self._turn_away(connection, str(error))
            return
        self._said[connection] = since, said + data
        if name is not None:
            self._let_go(connection)
            self._usher(connection, name)

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        self._let_go(connection)
        refuse(connection, why)

    def _let_go(self, connection: socket.socket) -> None:
        del self._said[connection]
        self._router.forget(connection.fileno())
