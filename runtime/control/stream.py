"""One authenticated stream: frames out of an outbox, records in, and a watch over whether the other end lives.

Both ends say something at least four times in a timeout. An end that says nothing for a whole one is lost; so is one
that takes nothing for a whole one while more than enough waits for it, unless it says itself that it waits for somebody
beneath it, for which it has a bound of its own. Time in which this end did not run, on a machine with too much to do,
is not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from monarch.runtime.control import codec
from monarch.runtime.control.handshake import Seals
from monarch.runtime.control.outbox import Outbox
from monarch.runtime.control.records import Beat, Close, Record

Read = Callable[[], Awaitable[bytes | None]]
"""The next frame; None at the stream's end."""
Write = Callable[[bytes], Awaitable[Any]]


class Stream:
    """Runs in the event loop; `put` and the rest are not for other threads. `bounded` tells that what is done with the
    records is waited for no longer than some bound."""

    def __init__(self, read: Read, write: Write, seals: Seals, timeout: float, bounded: bool = True) -> None:
        self._read = read
        self._write = write
        self._seals = seals
        self.timeout = timeout
        self._bounded = bounded
        self._outbox = Outbox()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closing = False
        self._heard = self._wrote = self._now()
        self._waiting = False
        self._peer_waits = False
        self.closed = False  # by the other end, in order: what it has said is to be done

    # -- sending ---------------------------------------------------------------------------------------------------

    def put(self, record: Record) -> None:
        if self._closing:
            return
        self._outbox.put(record)
        self._closing = isinstance(record, Close)
        if self._outbox.full:
            self._room.clear()
        self._news.set()

    @property
    def full(self) -> bool:
        return not self._room.is_set()

    async def room(self) -> None:
        """Until it is not full. A stream that ends has room."""
        await self._room.wait()

    # -- running ---------------------------------------------------------------------------------------------------

    async def run(self, receive: Callable[[Sequence[Record]], Awaitable[None]]) -> str:
        """Until the stream ends; the reason why, or "" when one end closed it. `receive` takes the records of a frame;
        no more are read before it returns. What it raises goes through."""
        tasks = [asyncio.ensure_future(each) for each in (self._receiving(receive), self._sending(), self._watching())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._closing = True
            self._room.set()

    async def _receiving(self, receive: Callable[[Sequence[Record]], Awaitable[None]]) -> str:
        while True:
            frame = await self._read()
            if frame is None:
                return "the connection was closed"
            records = codec.decode(*self._seals.opener.open(frame))
            self._heard = self._now()
            closed = next((record for record in records if isinstance(record, Close)), None)
            for record in records:
                if isinstance(record, Beat):
                    self._peer_waits = record.waiting
            said = [record for record in records if not isinstance(record, Beat | Close)]
            if said:
                self._waiting = True
                try:
                    await receive(said)
                finally:
                    self._waiting = False
                    self._heard = self._now()
            if closed is not None:
                self.closed = True
                return closed.reason

    async def _sending(self) -> str:
        beaten = self._now()
        while True:
            beat = self.timeout / 4
            if not self._outbox:
                self._news.clear()
                timer = asyncio.get_running_loop().call_at(beaten + beat, self._news.set)
                await self._news.wait()
                timer.cancel()
            records = self._outbox.take()
            if not records or self._now() - beaten >= beat:
                beaten = self._now()
                records.insert(0, Beat(self._waiting and self._bounded))
            head, data = codec.encode(records)
            await self._write(self._seals.sealer.seal(head, data))
            self._wrote = self._now()
            if not self._outbox.full:
                self._room.set()
            if isinstance(records[-1], Close):
                await asyncio.Event().wait()  # for the other end to close, or the watch to end this

    async def _watching(self) -> str:
        looked = self._now()
        while True:
            now = self._now()
            # While this end did not run itself, it has read nothing of what the other has said.
            slept = max(0.0, now - looked - 2 * self.timeout / 10)
            self._heard, self._wrote = (min(now, since + slept) for since in (self._heard, self._wrote))
            looked = now
            if not self._waiting and now - self._heard >= self.timeout:
                return f"nothing was heard from it for {self.timeout:g} s"
            if self.full and not self._peer_waits and now - self._wrote >= self.timeout:
                return f"it has taken nothing for {self.timeout:g} s, and {self._outbox.waiting:,} bytes wait for it"
            await asyncio.sleep(self.timeout / 10)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
