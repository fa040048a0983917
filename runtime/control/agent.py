"""A host: it serves the controllers that attach it, and relays to the hosts beneath it.

Each controller, or host above that has this one beneath it, has a session: a stream, a relay, and a service of its own
in a thread of its own. Sessions know nothing of each other.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from monarch.compiler.plan import MonarchError
from monarch.runtime.control import limits
from monarch.runtime.control.connect import METHOD, OPTIONS
from monarch.runtime.control.connections import Connections
from monarch.runtime.control.handshake import (
    Agreed,
    HostHandshake,
    NoSuchSession,
    Refused,
    Release,
    Session,
    VersionsDiffer,
)
from monarch.runtime.control.host_info import describe, release
from monarch.runtime.control.hub import Hub
from monarch.runtime.control.inbox import Handoff, Inbox
from monarch.runtime.control.loop import log, run, soon
from monarch.runtime.control.message import Message, Reply, Service
from monarch.runtime.control.outbox import cost
from monarch.runtime.control.records import (
    Assembly,
    Attach,
    Close,
    HostInfo,
    HostPart,
    Malformed,
    Progress,
    Record,
    Start,
    started,
)
from monarch.runtime.control.relay import SERVICE, Down, Gone, Ready, Relay, Up
from monarch.runtime.control.security import Security, split_address
from monarch.runtime.control.stream import Broken, Connected, Stream
from monarch.runtime.shared.descriptors import for_strangers

_REASONS = 256

MakeService = Callable[[Reply, HostInfo], Service]


def serve(
    listen: str,
    security: Security,
    service: MakeService,
    *,
    advertise: str = "",
    data_bind: str = "",
) -> Agent:
    """Make this process a host that listens on `listen` ("10.0.0.1:4242"; port 0 takes a free one).

    `service(reply, info)` is called for each controller that attaches, in a thread of its own. gRPC starts threads
    here, so whatever is to fork without them has to be started before. Raises MonarchError where the address cannot be
    listened on, or not with this security.
    """
    security.check(listen)
    agent = Agent(security, service, advertise, data_bind)
    run(agent._start(listen))
    return agent


class _GivenUp(Exception):
    """A controller has not kept its part, such as to say something now and then."""


class Agent:
    """A host that serves. `address` is where it listens, with the real port."""

    def __init__(
        self,
        security: Security,
        service: MakeService,
        advertise: str = "",
        data_bind: str = "",
        own: Release | None = None,
    ) -> None:
        self.address = ""
        self.security = security
        self.make_service = service
        self.advertise = advertise
        self.data_bind = data_bind
        self.own = own or release()
        self.sessions: dict[bytes, _Session] = {}
        """By name."""
        self._given_up: dict[bytes, str] = {}
        """The reason, by name, of the last that ended so: a controller that was silent asks for the session later."""
        self._ends: set[asyncio.Task[None]] = set()

    async def _start(self, listen: str) -> None:
        import grpc

        host, _ = split_address(listen)
        options = (
            *OPTIONS,
            ("grpc.so_reuseport", 0),
            # A peer that connects and sends nothing, or opens no stream, uses up a descriptor.
            ("grpc.max_allowed_incoming_connections", limits.STREAMS + for_strangers(limits.STRANGERS)),
            ("grpc.server_handshake_timeout_ms", int(1000 * limits.HANDSHAKE_SECONDS)),
            ("grpc.max_connection_idle_ms", int(1000 * limits.HANDSHAKE_SECONDS)),
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.STREAMS)
        name, method = METHOD.strip("/").split("/")
        handler = grpc.method_handlers_generic_handler(
            name, {method: grpc.stream_stream_rpc_method_handler(self._attach)}
        )
        self._server.add_generic_rpc_handlers((handler,))
        credentials = self.security.server_credentials()
        try:
            port = (
                self._server.add_secure_port(listen, credentials)
                if credentials
                else self._server.add_insecure_port(listen)
            )
        except RuntimeError as error:
            raise MonarchError(
                f"cannot listen on {listen}: {_why_not(listen) or error}",
                hint="give an address of this machine, by name or number, and a port that nothing listens on; "
                "port 0 takes one that is free.",
            ) from None
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await self._server.start()
        self.connections = Connections(port)

    def close(self, reason: str = "the host was ended") -> None:
        """End all sessions, and stop listening."""
        run(self._close(reason))

    async def _close(self, reason: str) -> None:
        for session in list(self.sessions.values()):
            session.stream.put(Close(reason))
            if not session.connected:
                self._end(session, reason)
        await self._server.stop(limits.HANDSHAKE_SECONDS)
        while self._ends:
            await asyncio.wait(self._ends)
        self.connections.close()

    async def _attach(self, _: Any, call: Any) -> None:
        """One stream, from its first frame to its end."""
        import grpc

        peer = unquote(call.peer())
        self.connections.know(peer)
        session: _Session | None = None
        reason, goes_on, turn = "the connection broke", True, 0
        try:
            handshake = await asyncio.wait_for(self._greet(call), limits.HANDSHAKE_SECONDS)
            session = self._session(handshake, peer)
            turn = session.turn = session.turn + 1  # before any wait: a peer that breaks off here ends it
            await session.part()
            proof, agreed = handshake.finish(session.stream.taken)
            self.sessions[agreed.session.name] = session
            session.known = agreed.session
            await asyncio.wait_for(call.write(proof), limits.HANDSHAKE_SECONDS)
            reason = await session.run(call, agreed, turn)
            goes_on = False
            if reason and not session.stream.closed:
                raise _GivenUp(reason)
        except _GivenUp as error:  # for a controller that was silent, and goes on: it would not know why
            await call.abort(grpc.StatusCode.ABORTED, f"the host has given this controller up: {error}")
        except VersionsDiffer as error:
            log.warning("%s: refused: %s", peer, error)
            await call.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except NoSuchSession as error:
            log.info("%s: refused: %s", peer, error)
            await call.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except Refused as error:
            log.warning("%s: refused: %s", peer, error)
            await call.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except TimeoutError:
            log.warning("%s: refused: it has not proved its identity within %g s", peer, limits.HANDSHAKE_SECONDS)
            await call.abort(grpc.StatusCode.UNAUTHENTICATED, "the handshake took too long")
        except Malformed as error:
            reason, goes_on = str(error), False
            log.warning("%s: ended: %s", peer, error)
            await call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (Broken, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            reason = f"the connection broke: {error}"
        finally:
            if session is None or session.turn != turn:  # it goes on over another connection
                pass
            elif goes_on and session.stream.goes_on and session.reconnect:
                log.info("%s: cut off: its controller has %g s to connect again", peer, session.reconnect)
                session.wait(partial(self._end, session, reason))
            else:
                await asyncio.shield(self._end(session, reason))

    def _end(self, session: _Session, reason: str) -> asyncio.Task[None]:
        """Let go of a session, once."""
        if session.ends is None:
            session.stop()
            if reason:
                self._given_up[session.known.name] = reason
                while len(self._given_up) > _REASONS:
                    del self._given_up[next(iter(self._given_up))]
            log.info("%s: detached: %s", session.peer, reason or "it has closed")
            session.ends = asyncio.ensure_future(self._let_go(session))
            self._ends.add(session.ends)
            session.ends.add_done_callback(self._ends.discard)
        return session.ends

    async def _let_go(self, session: _Session) -> None:
        await session.end()
        self.sessions.pop(session.known.name, None)

    async def _greet(self, call: Any) -> HostHandshake:
        """A handshake in which the other end has proved its identity."""
        handshake = HostHandshake(self.security.secret, self.own, self._find)
        await call.write(handshake.challenge(await _due(call)))
        handshake.check(await _due(call))
        return handshake

    def _find(self, name: bytes) -> Session:
        """Raises NoSuchSession."""
        session = self.sessions.get(name)
        if session is not None and session.ends is None:
            return session.known
        if reason := self._given_up.get(name):
            raise NoSuchSession(f"the host has given this controller up: {reason}")
        raise NoSuchSession("the session is over")

    def _session(self, handshake: HostHandshake, peer: str) -> _Session:
        """The session of a connection, which may have had others before. Raises NoSuchSession."""
        if not handshake.session.name:
            return _Session(self, handshake.session, peer)
        self._find(handshake.session.name)
        session = self.sessions[handshake.session.name]
        session.peer = peer
        return session


class _Session:
    """The session of one attached controller. Runs in the event loop but for the service's thread."""

    def __init__(self, agent: Agent, known: Session, peer: str) -> None:
        self._agent = agent
        self.known = known
        self.peer = peer
        """The other end of its latest connection."""
        self.turn = 0
        """How many connections it has had."""
        self.reconnect = 0.0
        """For so many seconds it waits for another connection."""
        self.ends: asyncio.Task[None] | None = None
        """Ends the session."""
        self.stream = Stream(limits.HANDSHAKE_SECONDS)
        self._service = _Service(self)
        self._relay = Relay()
        self.hub = Hub(self._relay, agent.security, agent.own, self.stream, self._service)
        self._running: asyncio.Future[str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> bool:
        return self._running is not None

    async def run(self, call: Any, agreed: Agreed, turn: int) -> str:
        """Until the session ends; the reason. Raises Broken, or what gRPC does, where this connection, number `turn`,
        ends alone."""
        if turn != self.turn:
            raise Broken("the controller has opened another")
        connection = Connected(partial(_read, call), call.write, agreed)
        running = self._running = asyncio.ensure_future(self.stream.run(connection, self._receive))
        try:
            return await running
        except asyncio.CancelledError:
            if turn == self.turn:
                raise
            raise Broken("the controller has opened another") from None
        finally:
            if turn == self.turn:
                self._running = None

    async def part(self) -> None:
        """Take nothing more over the connection that there is: another follows, which is counted already."""
        if self._timer is not None:
            self._timer.cancel()
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])

    def wait(self, give_up: Callable[[], object]) -> None:
        """For another connection, and no longer than it may take."""
        self._timer = asyncio.get_running_loop().call_later(self.reconnect, give_up)

    async def _receive(self, records: Sequence[Record]) -> None:
        for record in records:
            self.hub.handle(Down(record))
            if isinstance(record, Attach):
                log.info("%s: attached, with %d hosts beneath", self.peer, len(record.addresses) - 1)
                self.stream.timeout, self.reconnect = record.timeout, record.reconnect
                agent = self._agent
                info = describe(record.number, record.addresses[0], agent.advertise, agent.data_bind)
                self._service.start(info, agent.make_service, record.timeout)
        await self.hub.room()

    def stop(self) -> None:
        """Begin nothing more, unless the controller has closed it."""
        self.stream.end()
        if not self.stream.closed:
            self._service.discard()

    async def end(self) -> None:
        """Detach those beneath, and tell the service."""
        seconds = self.stream.timeout
        await asyncio.gather(self.hub.close(seconds), self._service.end(seconds))


async def _read(call: Any) -> bytes | None:
    import grpc

    frame = await call.read()
    return None if frame is grpc.aio.EOF else frame


class _Service:
    """A session's service, and the thread that runs it."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._assembly = Assembly()
        self._inbox: Inbox[Message | None] = Inbox()
        self._said: Handoff[Record] = Handoff(self._say)
        self._thread: threading.Thread | None = None
        self._info: HostInfo | None = None
        self._timeout = 0.0
        self._ended = asyncio.Event()
        self._releases: set[asyncio.Task[None]] = set()

    # -- the hub's view ------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return self._inbox.full

    async def room(self) -> None:
        await self._inbox.room()

    def put(self, record: Record) -> None:
        assert isinstance(record, Start | HostPart)
        message = self._assembly.take(record)
        if message is not None:
            assert self._info is not None
            self._inbox.put(message, limits.RECORD_COST + len(message.data))

    def start(self, info: HostInfo, make: MakeService, timeout: float) -> None:
        self._info = info
        self._timeout = timeout
        self._thread = threading.Thread(target=self._serve, args=(info, make), name="monarch-service", daemon=True)
        self._thread.start()
        self._watch = asyncio.ensure_future(self._watching())

    async def _watching(self) -> None:
        """A service that takes nothing while more than enough waits for it is lost: nobody else is to wait for it."""
        while not (self.full and time.monotonic() - self._inbox.taken >= self._timeout):
            await asyncio.sleep(self._timeout / 4)
        reason = f"its service has taken nothing for {self._timeout:g} s, and too much waits for it"
        log.error("%s", reason)
        self._inbox.abandon()
        self._happened(Gone(SERVICE, reason))

    def discard(self) -> None:
        """The controller has gone without a word: its requests have no purpose any more."""
        self._inbox.discard()

    async def end(self, seconds: float) -> None:
        """After the messages that have come already. A service that takes longer than that ends on its own."""
        self._said.end()
        if self._thread is None:
            return
        self._watch.cancel()
        self._inbox.put(None)
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            log.warning("the service has not ended within %g s", seconds)

    # -- the service's thread --------------------------------------------------------------------------------------

    def _serve(self, info: HostInfo, make: MakeService) -> None:
        try:
            try:
                service = make(self._reply, info)
            except Exception as error:
                self._failed("its service could not be started", error)
                return
            soon(self._happened, Ready(info))
            try:
                while (message := self._inbox.take()) is not None:
                    service.receive(message)
            except Exception as error:
                self._failed("its service failed", error)
            finally:
                self._detach(service)
        finally:
            soon(self._ended.set)

    def _failed(self, what: str, error: Exception) -> None:
        log.error("%s", what, exc_info=error)
        self._inbox.abandon()
        soon(self._happened, Gone(SERVICE, f"{what}: {type(error).__name__}: {error}"))

    def _detach(self, service: Service) -> None:
        try:
            service.detached()
        except Exception as error:
            log.error("detaching a service failed", exc_info=error)

    def _happened(self, event: Ready | Gone) -> None:
        self._session.hub.handle(event)

    # -- replies ---------------------------------------------------------------------------------------------------

    def _reply(self, message: Message) -> None:
        assert self._info is not None
        if message.progress:
            record: Record = Progress(message.kind, message.mesh, _numbers(message.progress))
        else:
            record = started(message, host=self._info.number)
        # Longer than the stream may be stuck, which is then given up, and with it this session.
        if not self._said.put(record, cost(record), 2 * self._timeout):
            raise MonarchError(f"the controller has taken nothing for {2 * self._timeout:g} s")

    def _say(self, records: Sequence[Record]) -> None:
        try:
            for record in records:
                self._session.hub.handle(Up(SERVICE, record))
        except Malformed as error:
            log.error("the service's message cannot be parsed: %s", error)
            self._happened(Gone(SERVICE, f"its service's message cannot be parsed: {error}"))
        if self._session.stream.full:
            task = asyncio.ensure_future(self._release())
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
        else:
            self._said.release()

    async def _release(self) -> None:
        await self._session.stream.room()
        self._said.release()


def _why_not(listen: str) -> str:
    """Why nothing can listen there, which gRPC does not say: "Address already in use"; empty where something could."""
    host, port = split_address(listen)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(where)
            tried.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _numbers(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(numbers) > limits.NUMBERS or not all(-(1 << 63) <= number < 1 << 63 for number in numbers):
        raise ValueError(f"progress is at most {limits.NUMBERS} whole numbers of 8 bytes")
    return tuple(numbers)


async def _due(call: Any) -> bytes:
    import grpc

    frame = await call.read()
    if frame is grpc.aio.EOF:
        raise Refused("it closed the connection during the handshake")
    return frame
