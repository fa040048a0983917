"""One authenticated stream: frames out of an outbox, records in, and a watch over whether the other end lives.

Both ends say something at least four times in a timeout. An end that says nothing for a whole one is lost; so is one
that takes nothing for a whole one while more than enough waits for it, unless it says itself that it waits for somebody
beneath it, for which it has a bound of its own. Time in which this end did not run, on a machine with too much to do,
is not counted.

A stream outlives its connection: frames that were lost on the way are sent again over the next one (see `frames`). The
end that opens connections opens another, also where it has heard nothing for half a timeout: whatever is between the
two may have forgotten the old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch.runtime.control import codec, limits
from monarch.runtime.control.frames import Frames
from monarch.runtime.control.handshake import Agreed
from monarch.runtime.control.outbox import Outbox
from monarch.runtime.control.records import Beat, Close, Record

Read = Callable[[], Awaitable[bytes | None]]
"""The next frame; None at the stream's end."""
Write = Callable[[bytes], Awaitable[Any]]


class Broken(Exception):
    """A connection has ended, and the stream has not."""


class Silent(Broken):
    """A connection has not ended, and nothing comes over it."""


@dataclass(frozen=True)
class Connected:
    """A connection, behind its handshake."""

    read: Read
    write: Write
    agreed: Agreed


class Stream:
    """Runs in the event loop; `put` and the rest are not for other threads. `bounded` says that waits for the handling
    of records have a bound, and `opens` that this end opens connections, more than one."""

    def __init__(self, timeout: float, bounded: bool = True, opens: bool = False) -> None:
        self.timeout = timeout
        self._bounded = bounded
        self._opens = opens
        self._outbox = Outbox()
        self._frames = Frames[tuple[bytes, bytes]]()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closing = False
        self._closed_here = False  # the frame that says so was made
        self.heard = self._wrote = self._now()
        self._waiting = False
        self._peer_waits = False
        self.closed = False  # by the other end, in order: its records come first

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

    @property
    def taken(self) -> int:
        """How many frames of the other end's were taken."""
        return self._frames.taken

    # -- running ---------------------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether another connection is of use where one has broken."""
        return not self._closing and not self.closed

    async def run(self, connection: Connected, receive: Callable[[Sequence[Record]], Awaitable[None]]) -> str:
        """Until the stream ends, on this connection; the reason why, or "" when one end closed it. Raises Broken, or
        what reading raises, where the connection ends and the stream does not. `receive` takes the records of a frame;
        no more are read before it returns. Its errors go through."""
        self._frames.go_on(connection.agreed.taken)
        self.heard = self._wrote = self._now()
        works = self._receiving(connection, receive), self._sending(connection), self._watching()
        tasks = [asyncio.ensure_future(each) for each in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """It runs on no other connection: nothing waits for room, and nothing more is sent."""
        self._closing = True
        self._room.set()

    async def _receiving(self, connection: Connected, receive: Callable[[Sequence[Record]], Awaitable[None]]) -> str:
        frames, opener = self._frames, connection.agreed.seals.opener
        while True:
            frame = await connection.read()
            if frame is None:
                raise Broken("the connection was closed")
            head, data, taken = opener.open(frame)
            was_full = frames.full
            frames.acknowledged(taken)
            frames.take(_size(head, data))
            records = codec.decode(head, data)
            self.heard = self._now()
            if frames.due or was_full:
                self._news.set()
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
                    self.heard = self._now()
            if closed is not None:
                self.closed = True
                return closed.reason

    async def _sending(self, connection: Connected) -> str:
        frames, sealer, beaten = self._frames, connection.agreed.seals.sealer, self._now()
        while True:
            if frames.written:
                if self._closed_here:
                    await asyncio.Event().wait()  # for the other end to close, or the watch to end this
                beat = beaten + self.timeout / 4
                records = [] if frames.full else self._outbox.take()
                if self._now() >= beat or (frames.due and not records):
                    beaten = self._now()
                    records.insert(0, Beat(self._waiting and self._bounded))
                if not records:
                    self._news.clear()
                    timer = asyncio.get_running_loop().call_at(beat, self._news.set)
                    await self._news.wait()
                    timer.cancel()
                    continue
                head, data = codec.encode(records)
                frames.put((head, data), _size(head, data))
                self._closed_here = isinstance(records[-1], Close)
            await connection.write(sealer.seal(*frames.next(), frames.say()))
            self._wrote = self._wrote if frames.full else self._now()
            if not self._outbox.full:
                self._room.set()

    async def _watching(self) -> str:
        looked = self._now()
        while True:
            now = self._now()
            # While this end did not run itself, it has read nothing from the other.
            slept = max(0.0, now - looked - 2 * self.timeout / 10)
            self.heard, self._wrote = (min(now, since + slept) for since in (self.heard, self._wrote))
            looked = now
            if not self._waiting and now - self.heard >= self.timeout:
                return self.silence
            if self.full and not self._peer_waits and now - self._wrote >= self.timeout:
                return f"it has taken nothing for {self.timeout:g} s, and {self._outbox.waiting:,} bytes wait for it"
            if self._opens and not self._waiting and now - self.heard >= self.timeout / 2:
                raise Silent(self.silence)
            await asyncio.sleep(self.timeout / 10)

    @property
    def silence(self) -> str:
        """The report about an end that is silent."""
        return f"nothing was heard from it for {self.timeout:g} s"

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _size(head: bytes, data: bytes) -> int:
    """The bytes that a frame counts, as long as it is kept."""
    return limits.RECORD_COST + len(head) + len(data)
