"""The thin loop around a `Relay`: opens streams to children, feeds what comes in to the relay, and does as it says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from monarch.runtime.control.connect import Unreachable, connect, why
from monarch.runtime.control.handshake import Release
from monarch.runtime.control.loop import log
from monarch.runtime.control.records import Close, Malformed, Record
from monarch.runtime.control.relay import PARENT, SERVICE, Call, Drop, Event, Gone, Relay, Send, Up
from monarch.runtime.control.security import Security
from monarch.runtime.control.stream import Stream


class Sink(Protocol):
    """Where the hub sends what is for above, or for the host's own service."""

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
        """Raises Malformed where what came from above, or from the service, is not allowed."""
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
                    case Call(child):
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

    async def _run(self, call: Call) -> None:
        """One child, from the connection to its end."""
        address, timeout = call.attach.addresses[0], call.attach.timeout
        reason = "its stream failed"
        try:
            connection = await connect(address, self._security, self._own, timeout)
            try:
                stream = Stream(connection.read, connection.write, connection.seals, timeout, self._bounded)
                stream.put(call.attach)
                if self._closing:
                    stream.put(Close())
                self._streams[call.child] = stream
                reason = await stream.run(partial(self._receive, call.child)) or "it was ended"
            finally:
                self._streams.pop(call.child, None)
                await connection.close()
        except Unreachable as error:
            reason = str(error)
        except Malformed as error:
            reason = f"what it said cannot be understood: {error}"
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

    async def _receive(self, child: int, records: Sequence[Record]) -> None:
        for record in records:
            self.handle(Up(child, record))
        await self._up.room()

    async def close(self, seconds: float) -> None:
        """Detach everybody beneath. Who has not gone after so long is let go of."""
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


def _call_errors() -> tuple[type[Exception], ...]:
    import grpc

    return (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
