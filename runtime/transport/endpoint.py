"""One process's end of all its links: its registered memory, the peers that it accepts, and its ways to reach
others."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import buffers, greeting, handshake, plug, sockets
from monarch.runtime.transport.buffers import MemoryRange, view_of
from monarch.runtime.transport.cuda import staging
from monarch.runtime.transport.handshake import HandshakeFailed, Steps
from monarch.runtime.transport.interface import Address, Check, LinkLost, Memory, Region
from monarch.runtime.transport.loop import Loop
from monarch.runtime.transport.plug import Accepted, EndpointContext, Offer, Owned, Transport, Unsuitable
from monarch.runtime.transport.regions import Regions, region_of
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.streams import Ends, LocalStream, Stream, TlsStream, tune

_log = logging.getLogger("monarch.transport")

GREETINGS = 64  # connections in the handshake at once; the oldest goes for a new one
GREETING_SECONDS = 5.0
_PAUSE = 0.5
_CLOSING = 4.0

PREFERENCE = tuple(plug.TRANSPORTS)


class Registration:
    """Registered memory. It stays registered, and its memory alive, until `drop` or the end of a `with` block."""

    def __init__(self, endpoint: Endpoint, owned: Owned) -> None:
        self.region: Region = region_of(owned)
        self._endpoint = endpoint
        self._owned = owned

    def drop(self) -> None:
        """No peer reads or writes the memory through this registration once this returns (on the I/O thread: soon
        after). Works under way end with AccessRefused at the peer."""
        self._endpoint._drop(self._owned)

    def drop_soon(self) -> None:
        """Have it dropped by the I/O thread. Takes no locks, so it may be called from a finalizer."""
        try:
            self._endpoint.loop.call(self.drop)
        except MonarchError:
            pass  # the endpoint is closed, and has dropped it

    def divert(self, offset: int, value: int, target: Memory) -> None:
        """Receive the next put to `offset` whose signal stores `value` into `target`, which it has to fill, and not
        into the region: the bytes that this process receives itself, and has not begun to; see `undivert`."""
        self._owned.diverted[offset, value] = view_of(target, writable=True)

    def undivert(self, offset: int, value: int) -> bool:
        """Divert no longer. Once the signal has been seen: whether the bytes are in the target; else they are in the
        region."""
        return self._owned.diverted.pop((offset, value), None) is None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.drop()


class Endpoint:
    """Joins this process to others. One a process, as a rule; every method may be called from any thread.

    `secret`      at least 16 random bytes. A peer that knows it may connect; regions are then reached by their keys
    `bind`        the address of this machine to listen on for TCP; `advertise` is the name that others know it by
    `transports`  which to use, the preferred first
    `tls`         contexts of a server and of a client: TCP connections are wrapped before anything else is sent
    `lost`        called on the I/O thread with every link that ends but for `close` being called here
    `joined`      called on the I/O thread with every link that a peer has made
    `patience`    seconds after which a TCP connection whose other end is silent is given up

    Listens from the start; its I/O thread starts at once, too, where it listens. Does not survive a fork: in the child
    it is closed, and nobody else's connections suffer.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        bind: str = "127.0.0.1",
        advertise: str | None = None,
        transports: Sequence[str] = PREFERENCE,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        lost: Callable[[StreamLink, LinkLost], None] | None = None,
        joined: Callable[[StreamLink], None] | None = None,
        patience: float = 10.0,
    ) -> None:
        if len(secret) < handshake.SHORTEST_SECRET:
            raise MonarchError(
                f"an endpoint's secret has {len(secret)} bytes, and {handshake.SHORTEST_SECRET} are the least",
                hint="Take secrets.token_bytes(32).",
            )
        if unknown := [name for name in transports if name not in plug.TRANSPORTS]:
            raise MonarchError(f"no such transport: {', '.join(unknown)}; there are {', '.join(plug.TRANSPORTS)}")
        process = secrets.token_hex(16)
        self._secret = bytes(secret)
        self._tls = tls
        self._lost = lost
        self._joined = joined
        self._patience = patience
        self._lock = threading.Lock()
        self._links: list[StreamLink] = []
        self._greetings: dict[greeting.Greeting, None] = {}
        self._closed = False
        self._forgotten = False
        self._regions = Regions()
        self.loop = Loop(f"monarch-transport-{process[:8]}")
        host = sockets.host_identity()
        context = EndpointContext(process, host, self.loop, self._regions)
        self._transports: dict[str, Transport] = {}
        self._unavailable: dict[str, str] = {}
        for name in transports:
            transport: Transport = plug.load(name)(context)
            why = transport.available()
            if why is None:
                self._transports[name] = transport
            else:
                self._unavailable[name] = why
        self._preference = tuple(transports)
        self._listeners: list[socket.socket] = []
        offers: dict[str, dict[str, Any]] = {}
        kinds = {kind for transport in self._transports.values() for kind in transport.streams}
        try:
            if "local" in kinds:
                listener, offers["local"] = sockets.listen_local(process)
                self._listeners.append(listener)
            if "tcp" in kinds:
                listener, offers["tcp"] = sockets.listen_tcp(bind, advertise)
                self._listeners.append(listener)
        except MonarchError:
            for listener in self._listeners:
                listener.close()
            for transport in self._transports.values():
                transport.close()
            self.loop.close()
            raise
        self.address = Address(process, host, offers)
        for listener in self._listeners:
            self._listen(listener)
        _endpoints.add(self)

    def __repr__(self) -> str:
        return f"<endpoint {self.address.process[:8]}>"

    @property
    def links(self) -> list[StreamLink]:
        """The open links, whichever side made them."""
        with self._lock:
            return list(self._links)

    @property
    def transports(self) -> dict[str, str]:
        """Each transport that was asked for, and why it is unavailable here ("" where it is not)."""
        return {name: self._unavailable.get(name, "") for name in self._preference}

    def use_tls(self, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None) -> None:
        """Wrap, or do not wrap, TCP connections that are made from now on, by either end."""
        self._tls = tls

    # -- memory ----------------------------------------------------------------------------------------------------

    def register(self, memory: Memory, *, file: int | None = None, offset: int = 0) -> Registration:
        """Let peers that get the region read and write this memory. `file` is a memfd that has it from byte `offset`:
        peers on this host then map it too, with all its other content. They do the same with the file of a tensor whose
        `share_memory_()` was called. Raises MonarchError."""
        self._check_open()
        if file is None:
            file, offset = buffers.file_of(memory) or (None, 0)
        owned = self._regions.add(memory, file, offset)
        try:
            if owned.size and staging.reaches(owned.device):
                staging.await_launched(owned)
            for name, transport in self._transports.items():
                found = transport.register(owned)
                if found is not None:
                    owned.details[name] = found
            if owned.view is None and not owned.details and not staging.reaches(owned.device):
                raise MonarchError(
                    f"no transport here reaches memory on {owned.device}; in use are {', '.join(self._transports)}",
                    hint="Copy it to host memory first.",
                )
        except BaseException:
            self._drop(owned)
            raise
        return Registration(self, owned)

    def _drop(self, owned: Owned) -> None:
        if owned.dropped:
            return
        owned.dropped = True
        if self._forgotten:
            return  # its peers are the parent's
        self._regions.remove(owned)
        for transport in self._transports.values():
            transport.drop(owned)
        if not self.loop.here():
            # A receive into the region ends before the I/O thread gets here; a send ends with its frame.
            self.loop.run(lambda: None)
            for link in self.links:
                link.await_unread(owned)

    def fetch_add(self, region: Region, offset: int, value: int) -> int:
        """On a region of this endpoint itself; atomic with writes that come over links."""
        return self.loop.run(
            lambda: self._regions.fetch_add(
                self._regions.word(region.number, bytes.fromhex(region.key), offset), offset, value
            )
        )

    def compare_swap(self, region: Region, offset: int, expected: int, desired: int) -> int:
        """On a region of this endpoint itself; atomic with writes that come over links."""
        return self.loop.run(
            lambda: self._regions.compare_swap(
                self._regions.word(region.number, bytes.fromhex(region.key), offset), offset, expected, desired
            )
        )

    def memory(self, region: Region, offset: int, size: int, write: bool) -> MemoryRange:
        """A range of a region of this endpoint itself. Raises AccessRefused."""
        owned = self._regions.checked(region.number, bytes.fromhex(region.key), offset, size, write)
        return buffers.range_of(owned.memory).part(offset, size)

    # -- links -----------------------------------------------------------------------------------------------------

    def connect(
        self, address: Address, secret: bytes | None = None, timeout: float = 10.0, check: Check | None = None
    ) -> StreamLink:
        """Make a link. `secret` is the peer's (by default this endpoint's own). Raises MonarchError, which lists the
        transports that were tried, and the errors of `check`."""
        self._check_open()
        if self.loop.here():
            raise MonarchError("an endpoint cannot connect on its own I/O thread")
        deadline = time.monotonic() + timeout
        reasons = [f"{name}: {self._unavailable[name]}" for name in self._preference if name in self._unavailable]
        stream: Stream | None = None
        try:
            for name, transport in self._transports.items():
                try:
                    if stream is None or not _serves(stream, transport):
                        if stream is not None:
                            stream.close()
                            stream = None
                        stream = self._reach(transport, address, secret or self._secret, deadline, check)
                    link = self._dial(transport, stream, deadline, check)
                except Unsuitable as error:
                    reasons.append(f"{name}: {error}")
                    continue
                link.reasons = (*reasons, f"{name}: {link.chosen}")
                stream = None
                self._take(link)
                _log.info("joined to %s over %s (%s)", link.name, link.transport, "; ".join(link.reasons))
                return link
        except (OSError, HandshakeFailed, TimeoutError) as error:
            why = f"not within {timeout:g} s" if isinstance(error, TimeoutError) else _why(error)
            raise MonarchError(
                f"cannot connect to process {address.process[:8]}: {why}", hint="\n".join(reasons)
            ) from error
        finally:
            if stream is not None:
                stream.close()
        raise MonarchError(f"no transport joins this process to process {address.process[:8]}", hint="\n".join(reasons))

    def _reach(
        self, transport: Transport, address: Address, secret: bytes, deadline: float, check: Check | None
    ) -> Stream:
        """An authenticated stream of a kind that the transport can use."""
        stream: Stream
        for kind in transport.streams:
            if kind not in address.offers or (kind == "local" and address.host != self.address.host):
                continue
            if kind == "local":
                stream = LocalStream(sockets.connect_local(address, deadline, check))
                uid = stream.credentials()[1]
                if uid != os.geteuid():
                    stream.close()
                    raise Unsuitable(f"user {uid} listens where the peer should")
            else:
                stream = self._reach_tcp(address, deadline, check)
            try:
                greeting.drive(handshake.prove(secret, self.address.process, address.process), stream, deadline, check)
            except BaseException:
                stream.close()
                raise
            stream.ends = Ends(address, self.loop, self._regions, 2, self._ended)
            return stream
        raise Unsuitable("the peer is on another host" if address.host != self.address.host else "the peer has none")

    def _reach_tcp(self, address: Address, deadline: float, check: Check | None) -> Stream:
        sock = sockets.begin_tcp(address)
        try:
            greeting.connected(sock, deadline, check)
            tune(sock, self._patience)
            if self._tls is None:
                return Stream(sock)
            wrapped = self._tls[1].wrap_socket(
                sock, server_hostname=address.offers["tcp"]["host"], do_handshake_on_connect=False
            )
        except BaseException:
            sock.close()
            raise
        try:
            greeting.shake(wrapped, deadline, check)
            return TlsStream(wrapped)
        except BaseException:
            wrapped.close()
            raise

    def _dial(self, transport: Transport, stream: Stream, deadline: float, check: Check | None) -> StreamLink:
        """Agree on a transport with the peer. Raises Unsuitable, with which the stream can be used further."""
        offer: Offer = transport.offer(stream.ends.peer)
        agreed = False
        try:
            message = {"transport": transport.name, "address": self.address.to_json(), "details": offer.details}
            answer = greeting.drive(_ask(message, offer.files), stream, deadline, check)
            files = [stream.files.popleft() for _ in range(len(stream.files))]
            if "details" not in answer or not isinstance(answer["details"], dict):
                raise Unsuitable(f"the peer says: {str(answer.get('refused'))[:300]}")
            agreed = True
            link = transport.dial(stream, offer, answer["details"], files)
        finally:
            if not agreed:
                transport.withdraw(offer)
        try:
            greeting.drive(announce({"use": True}), stream, deadline, check)
        except BaseException:
            self.loop.run(lambda: link.ended(LinkLost("the peer does not know that it is used")))
            raise
        return link

    def _take(self, link: StreamLink) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._links.append(link)
        if closed:
            self.loop.run(lambda: link.ended(LinkLost("the endpoint is closed")))
            link.stream.close()
            raise MonarchError("the endpoint is closed")
        link.open()

    def _ended(self, link: StreamLink, error: LinkLost) -> None:
        with self._lock:
            if link not in self._links:
                return
            self._links.remove(link)
        if self._lost is not None and not link.closing:
            self._lost(link, error)

    # -- accepting, on the I/O thread ------------------------------------------------------------------------------

    def _listen(self, listener: socket.socket) -> None:
        self.loop.watch(listener.fileno(), select.EPOLLIN, lambda events: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, where = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, most likely: try again later, instead of at once and for ever.
                _log.warning("cannot accept connections for %g s: %s", _PAUSE, error.strerror)
                self.loop.unwatch(listener.fileno())
                self.loop.later(_PAUSE, lambda: None if self._closed else self._listen(listener))
                return
            stream = self._admitted(sock)
            if stream is None:
                continue
            if len(self._greetings) >= GREETINGS:
                next(iter(self._greetings)).drop("other connections came before it proved its identity")
            who = "a local process" if stream.kind == "local" else f"{where[0]} port {where[1]}"
            greeted = greeting.Greeting(self.loop, stream, self._welcome(stream), who, GREETING_SECONDS, self._greeted)
            self._greetings[greeted] = None

    def _admitted(self, sock: socket.socket) -> Stream | None:
        """The stream of a connection, or None where it is not to be talked to at all."""
        if sock.family == socket.AF_UNIX:
            local = LocalStream(sock)
            pid, uid = local.credentials()
            if uid != os.geteuid():
                _log.warning("dropped a connection from process %d: it is another user's (%d)", pid, uid)
                local.close()
                return None
            return local
        try:
            tune(sock, self._patience)
            if self._tls is None:
                return Stream(sock)
            sock.setblocking(False)
            return TlsStream(self._tls[0].wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
        except OSError as error:
            _log.warning("dropped a connection: %s", error)
            sock.close()
            return None

    def _welcome(self, stream: Stream) -> Steps:
        """The acceptor's side: gives the link that the dialer has chosen to use."""
        process = yield from handshake.verify(self._secret, self.address.process)
        accepted: Accepted | None = None
        try:
            while True:
                message = yield from handshake.read_message()
                files = [stream.files.popleft() for _ in range(len(stream.files))]
                if accepted is not None and message.get("use") is True:
                    link, accepted = accepted.link, None
                    link.reasons = (f"{link.transport}: the peer chose it",)
                    return link
                _discard(accepted)
                accepted = None
                name = message.get("transport")
                try:
                    if not stream.known:
                        peer = Address.from_json(message.get("address"))
                        if peer.process != process:
                            raise HandshakeFailed("its address is not that of the process that it proved to be")
                        stream.ends = Ends(peer, self.loop, self._regions, 1, self._ended)
                    transport = self._transports.get(str(name))
                    if transport is None:
                        raise Unsuitable(self._unavailable.get(str(name), "it is not in use there"))
                    if not _serves(stream, transport):
                        raise Unsuitable(f"it does not work over a {stream.kind} socket")
                    details = message.get("details")
                    accepted = transport.accept(stream, details if isinstance(details, dict) else {}, files)
                except MonarchError as error:
                    raise HandshakeFailed(error.message) from None
                except Unsuitable as error:
                    for file in files:
                        os.close(file)
                    yield handshake.write_message({"refused": str(error)})
                    continue
                try:
                    yield handshake.write_message({"details": accepted.details}, accepted.files)
                finally:
                    for file in accepted.files:
                        os.close(file)
        finally:
            _discard(accepted)

    def _greeted(self, greeted: greeting.Greeting, link: StreamLink | None) -> None:
        self._greetings.pop(greeted, None)
        if link is None:
            return
        try:
            self._take(link)
        except MonarchError:
            return  # closed meanwhile
        _log.info("%s joined over %s", link.name, link.transport)
        if self._joined is not None:
            self._joined(link)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop everything: no links, no listeners, no thread, no descriptors are left. Works that are not finished end
        with LinkLost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.loop.run(self._stop_accepting)
        links = self.links
        for link in links:
            link.begin_to_close()
        deadline = time.monotonic() + _CLOSING
        for link in links:
            link.await_end(max(0.0, deadline - time.monotonic()))
        for owned in self._regions.all():
            self._drop(owned)
        for transport in self._transports.values():
            transport.close()
        self.loop.close()
        _endpoints.discard(self)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _stop_accepting(self) -> None:
        for listener in self._listeners:
            self.loop.unwatch(listener.fileno())
            listener.close()
        for greeted in list(self._greetings):
            greeted.drop("the endpoint is closed")

    def _check_open(self) -> None:
        if self._closed:
            raise MonarchError("the endpoint is closed, or was made before this process was forked")

    def _forget(self) -> None:
        """In the child of a fork: close the inherited files, so that the parent's peers see its end when it comes. No
        locks are taken, for their owners do not run here."""
        self._closed = self._forgotten = True
        for listener in self._listeners:
            listener.close()
        for greeted in self._greetings:
            greeted.stream.close()
        for link in self._links:
            link.forget()
        self.loop.forget()


# -- helpers -----------------------------------------------------------------------------------------------------------


def _ask(message: dict[str, Any], files: Sequence[int]) -> Steps:
    yield handshake.write_message(message, files)
    return (yield from handshake.read_message())


def announce(message: dict[str, Any]) -> Steps:
    yield handshake.write_message(message)


def _serves(stream: Stream, transport: Transport) -> bool:
    return ("local" if stream.kind == "local" else "tcp") in transport.streams


def _discard(accepted: Accepted | None) -> None:
    """A link that was accepted, and that the dialer does not use after all."""
    if accepted is not None:
        accepted.link.ended(LinkLost("the dialer uses another transport"))


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno:
        return os.strerror(error.errno)
    return str(error)


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _after_fork() -> None:
    for endpoint in list(_endpoints):
        endpoint._forget()
    _endpoints.clear()


os.register_at_fork(after_in_child=_after_fork)
