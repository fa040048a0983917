"""Connections between processes of different hosts.

An attached host listens on one port. A process that connects names in clear the process that it wants (`_WANTED`); the
host's agent hands the connection to that process, and knows no more of it. The two processes then speak TLS, where the
hosts were attached with it, prove to each other that they know the job's secret (`transport.handshake`), and only then
unpickle anything. All this is done in a short-lived thread that has `SECONDS` for it; whoever fails is dropped, and
logged.

The host of the root does not listen. The root itself connects to everyone it sends to, and is answered on the same
connection. Otherwise what passes between its host and others is relayed, by the root and by the other host's agent:

    root's host    process ⇄ root ⇄ agent ⇄ process    attached host
                             root ⇄ process
                             process ⇄ process              two attached hosts

The way from one process to another is chosen when it first sends something, and never changes. What is for several
processes of a host goes by its agent besides (`actors.processes.spreading`), and numbers keep the order (`order`).
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Protocol

from monarch.compiler.config import settings
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.messages.address import LONGEST, host_of, name_of, port_of
from monarch.runtime.actors.messages.link import Link, Loop
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.protocol import RELAY, Head
from monarch.runtime.actors.messages.recent import Recent
from monarch.runtime.control.security import TlsFiles
from monarch.runtime.transport import sockets
from monarch.runtime.transport.greeting import connected, drive, shake
from monarch.runtime.transport.handshake import HandshakeFailed, Steps, prove, read_message, verify, write_message
from monarch.runtime.transport.interface import Address
from monarch.runtime.transport.streams import Stream, TlsStream, tune

SECONDS = 10.0
"""Seconds in which a connection has to be made, and a process that connects has to prove its identity."""
_MAGIC = b"actors 1"
_WANTED = struct.Struct("8s16s")
WANTED_BYTES = _WANTED.size

_log = logging.getLogger("monarch.actors")


@dataclass(frozen=True)
class Across:
    """The data that the processes of a host need to speak to those on others."""

    secret: bytes
    """The job's: a process that has it is trusted."""
    tls: TlsFiles | None
    """The host's certificates, or None where the network is trusted."""
    bind: str
    advertise: str | None

    @property
    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """Of outgoing and of incoming connections; None without TLS."""
        return None if self.tls is None else _contexts(self.tls)


_contexts = cache(TlsFiles.contexts)


class Way(Protocol):
    """On which this process sends to one other."""

    def send(self, head: Head, payload: Payload) -> bool: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _Relayed:
    """The way to a process that this one has no connection with: another takes it on."""

    def __init__(self, send: Callable[[str, Head, Payload], bool], here: str, over: str, to: str) -> None:
        self.open = True
        self._send = send
        self._here = here
        self._over = over
        self._to = to

    def send(self, head: Head, payload: Payload) -> bool:
        return self.open and self._send(self._over, (RELAY, self._to, self._here, head), payload)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.open = False


class Network:
    """The links of one process. `across` is None as long as it has none."""

    def __init__(
        self,
        address: str,
        relay: str | None,
        loop: Loop,
        send: Callable[[str, Head, Payload], bool],
        deliver: Callable[[str, Head, Payload], None],
        lost: Callable[[str, str], None],
    ) -> None:
        """`relay` takes messages that this process cannot send itself; `lost(address, why)` is called in the I/O thread
        when there is no way to a process, or no more."""
        self.across: Across | None = None
        self._dialled_with: dict[str, Across] = {}
        self._address = address
        self._relay = relay
        self._loop = loop
        self._send = send
        self._deliver = deliver
        self._told = lost
        self._lock = threading.Lock()
        self.links: dict[str, list[Link]] = {}
        self._unreached: set[str] = set()
        self._ended: Recent[str, None] = Recent()

    def join(self, host: str, across: Across) -> None:
        """For the root: how the processes of an attached host are reached, by its tag."""
        self._dialled_with[host] = across

    def way(self, to: str) -> Way | None:
        """For messages to a process of another host, from now on."""
        with self._lock:
            for link in self.links.get(to, ()):
                if link.open:
                    return link
        across = self._dialled_with.get(host_of(to), self.across)
        if host_of(to) and across is not None:
            return self._dial(to, across)
        if self._relay is None or to == self._relay:
            return None
        return _Relayed(self._send, self._address, self._relay, to)

    @property
    def peers(self) -> list[str]:
        """The processes that this one has a connection with."""
        with self._lock:
            return list(self.links)

    def after_last(self, peer: str, task: Callable[[], None], seconds: float) -> None:
        """Call `task` once all that a process sent has been delivered: it has ended, and so its connections do. Waits
        so long at most. In the I/O thread."""
        with self._lock:
            links = [link for link in self.links.get(peer, ()) if not link.over]
        if not links:
            task()
            return

        def one_is_over() -> None:
            if all(link.over for link in links):
                task()

        for link in links:
            link.then.append(one_is_over)

        def give_up() -> None:
            for link in links:
                link.finish()

        self._loop.later(seconds, give_up)

    def gone(self, peer: str, ended: bool) -> None:
        """A process has `ended`, or counts as ended: it is not listened to any more."""
        with self._lock:
            if ended:
                self._ended[peer] = None
            else:
                self._unreached.add(peer)
            links = list(self.links.get(peer, ()))
        for link in links:
            link.close()

    def close(self) -> None:
        with self._lock:
            links = [link for several in self.links.values() for link in several]
        for link in links:
            link.close()

    def _new(self, peer: str) -> Link:
        link = Link(peer, self._loop, self._deliver, self._lost)
        with self._lock:
            self.links.setdefault(peer, []).append(link)
        return link

    def _lost(self, link: Link, why: str) -> None:
        with self._lock:
            several = self.links[link.peer]
            several.remove(link)
            if not several:
                del self.links[link.peer]
        self._told(link.peer, why)

    # -- connecting ----------------------------------------------------------------------------------------------------

    def _dial(self, to: str, across: Across) -> Link:
        link = self._new(to)

        def dial() -> None:
            try:
                stream = self._connect(to, across, monotonic() + SECONDS)
            except (OSError, HandshakeFailed, MonarchError) as error:
                link.fail(f"cannot be reached at {':'.join(map(str, port_of(to)))}: {_why(error)}")
            else:
                link.join(stream)

        threading.Thread(target=dial, name="monarch dial", daemon=True).start()
        return link

    def _connect(self, to: str, across: Across, deadline: float) -> Stream:
        host, port = port_of(to)
        sock = sockets.begin_tcp(Address(name_of(to), "", {"tcp": {"host": host, "port": port}}))
        try:
            connected(sock, deadline, None)
            tune(sock, settings.message_delivery_timeout)
            sock.send(_WANTED.pack(_MAGIC, bytes.fromhex(name_of(to))))
            stream = Stream(sock)
            if across.contexts is not None:
                client = across.contexts[1]
                sock = client.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                shake(sock, deadline, None)
                stream = TlsStream(sock)
            drive(self._introduction(to, across), stream, deadline, None)
        except BaseException:
            sock.close()
            raise
        return stream

    def _introduction(self, to: str, across: Across) -> Steps:
        yield from prove(across.secret, name_of(self._address), name_of(to))
        yield write_message({"address": self._address})

    # -- being connected to --------------------------------------------------------------------------------------------

    def admit(self, sock: socket.socket) -> None:
        """Somebody has connected to this process. In a thread of its own."""
        peer = _peer(sock)
        try:
            across = self.across
            if across is None:
                raise HandshakeFailed("this process takes no connections")
            deadline = monotonic() + SECONDS
            tune(sock, settings.message_delivery_timeout)
            sock.setblocking(False)
            stream = Stream(sock)
            if across.contexts is not None:
                sock = across.contexts[0].wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                shake(sock, deadline, None)
                stream = TlsStream(sock)
            address = drive(self._welcome(across), stream, deadline, None)
        except (OSError, HandshakeFailed, MonarchError) as error:
            _log.warning("dropped a connection from %s: %s", peer, _why(error))
            sock.close()
        else:
            self._new(address).join(stream)

    def _welcome(self, across: Across) -> Steps:
        process = yield from verify(across.secret, name_of(self._address))
        message = yield from read_message()
        address = message.get("address")
        if not isinstance(address, str) or len(address) > LONGEST or name_of(address) != process:
            raise HandshakeFailed("its address is not that of the process that it proved to be")
        if address in self._unreached or address in self._ended:
            raise HandshakeFailed("it counts as ended")
        return address


def wanted(data: bytes) -> str | None:
    """The name of the process that a connection to a host asks for, once enough bytes have come. Raises
    HandshakeFailed."""
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise HandshakeFailed("it did not begin as a process of this version does")
    return bytes(_WANTED.unpack(data)[1]).hex() if len(data) == _WANTED.size else None


def refuse(sock: socket.socket, why: str) -> None:
    _log.warning("dropped a connection from %s: %s", _peer(sock), why)
    sock.close()


def _peer(sock: socket.socket) -> str:
    try:
        return ":".join(map(str, sock.getpeername()[:2]))
    except OSError:
        return "somebody who has gone"


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it took longer than {SECONDS:g} s"
    if isinstance(error, MonarchError):
        return error.message
    return str(error)
