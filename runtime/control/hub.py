"""The thin loop around a `Relay`: opens streams to children, feeds incoming records to the relay, and carries out its
actions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from monarch.runtime.control.connect import Connection, Unreachable, connect, reconnect, why, why_broken
from monarch.runtime.control.handshake import Release
from monarch.runtime.control.loop import log
from monarch.runtime.control.records import Close, Malformed, Record
from monarch.runtime.control.relay import PARENT, SERVICE, Dial, Drop, Event, Gone, Relay, Send, Up
from monarch.runtime.control.security import Security
from monarch.runtime.control.stream import Broken, Connected, Silent, Stream


class Sink(Protocol):
    """Takes the records for above, or for the host's own service."""

    @property
    def full(self) -> bool: ...

    def put(self, record: Record) -> None: ...

    async def room(self) -> None: ...


class Hub:
    """Runs in the event loop. `bounded` as for `Stream`: that what goes up is taken within some bound."""

    def __init__(
        self,
        relay: Relay,
        security: Security,
        own: Release,
        up: Sink,
        service: Sink | None = None,
        bounded: bool = True,
    ) -> None:
        self._relay = relay
        self._security = security
        self._own = own
        self._up = up
        self._service = service
        self._bounded = bounded
        self._streams: dict[int, Stream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._faults: dict[int, str] = {}
        self._closing = False

    def handle(self, event: Event) -> None:
        """Raises Malformed where a record from above, or from the service, is not allowed."""
        events = deque([event])
        while events:
            for action in self._relay.handle(events.popleft()):
                match action:
                    case Send(to, record) if to == PARENT:
                        self._up.put(record)
                    case Send(to, record) if to == SERVICE:
                        assert self._service is not None
                        self._service.put(record)
                    case Send(to, record):
                        if to in self._streams:
                            self._streams[to].put(record)
                    case Dial(child):
                        self._tasks[child] = asyncio.ensure_future(self._run(action))
                    case Drop(child, reason):
                        self._faults.setdefault(child, reason)
                        self._tasks[child].cancel()

    @property
    def full(self) -> bool:
        return any(stream.full for stream in self._streams.values()) or (
            self._service is not None and self._service.full
        )

    async def room(self) -> None:
        """Until everybody beneath takes more."""
        while self.full:
            for stream in list(self._streams.values()):
                await stream.room()
            if self._service is not None:
                await self._service.room()

    async def _run(self, call: Dial) -> None:
        """One child, from the first connection to its end."""
        address, timeout = call.attach.addresses[0], call.attach.timeout
        reason = "its stream failed"
        try:
            connection = await connect(address, self._security, self._own, timeout)
            stream = Stream(timeout, self._bounded, opens=call.attach.reconnect > 0)
            stream.put(call.attach)
            if self._closing:
                stream.put(Close())
            self._streams[call.child] = stream
            try:
                while True:
                    reason, until = await self._run_on(connection, stream, call)
                    if not until:
                        break
                    session, taken = connection.agreed.session, stream.taken
                    log.info("%s: %s: connecting again", address, reason)
                    connection = await reconnect(address, self._security, self._own, session, taken, until, reason)
            finally:
                self._streams.pop(call.child, None)
                stream.end()
        except Unreachable as error:
            reason = str(error)
        except Malformed as error:
            reason = f"its message cannot be parsed: {error}"
            log.warning("%s: %s", address, reason)
        except asyncio.CancelledError:
            if call.child not in self._faults:
                raise
        except _call_errors() as error:
            reason = why(error)
        finally:
            self._tasks.pop(call.child, None)
            if not self._closing:
                self.handle(Gone(call.child, self._faults.get(call.child, reason)))

    async def _run_on(self, connection: Connection, stream: Stream, call: Dial) -> tuple[str, float]:
        """Run a stream on a connection. Why that has ended, and until when the stream is to go on over another one, by
        the loop's clock; 0 where it is not."""
        try:
            over = Connected(connection.read, connection.write, connection.agreed)
            return await stream.run(over, partial(self._receive, call.child)) or "it was ended", 0.0
        except Silent as error:
            return str(error), stream.heard + stream.timeout
        except _broken() as error:
            goes_on = call.attach.reconnect > 0 and stream.goes_on
            return why_broken(error), asyncio.get_running_loop().time() + call.attach.reconnect if goes_on else 0.0
        finally:
            await connection.close()

    async def _receive(self, child: int, records: Sequence[Record]) -> None:
        for record in records:
            self.handle(Up(child, record))
        await self._up.room()

    async def close(self, seconds: float) -> None:
        """Detach all children. Streams that are still open after so long are dropped."""
        self._closing = True
        for child, task in list(self._tasks.items()):
            if child in self._streams:
                self._streams[child].put(Close())
            else:
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _broken() -> tuple[type[Exception], ...]:
    return (Broken, *_call_errors())


def _call_errors() -> tuple[type[Exception], ...]:
    import grpc

    return (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
