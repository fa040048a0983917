"""One stream's watch over the other end, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from monarch.runtime.control import codec
from monarch.runtime.control.records import Close, Record
from monarch.runtime.control.stream import Connected, Stream

TIMEOUT = 1000.0


class Turned(asyncio.SelectorEventLoop):
    """Its clock is as far ahead as it is told."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


async def looked() -> None:
    """Until what is due has been done."""
    for _ in range(10):
        await asyncio.sleep(0)


async def watch(loop: Turned, seconds: float, times: int) -> str:
    """Why a stream ends whose other end says nothing while the clock goes on so far so many times, and closes then."""
    frames: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()

    async def write(frame: object) -> None: ...

    async def receive(records: Sequence[Record]) -> None: ...

    seals = SimpleNamespace(
        opener=SimpleNamespace(open=lambda frame: (*frame, 0)),
        sealer=SimpleNamespace(seal=lambda head, data, taken: (head, data)),
    )
    agreed = SimpleNamespace(seals=seals, taken=0)
    stream = Stream(TIMEOUT)
    running = asyncio.ensure_future(stream.run(Connected(frames.get, write, agreed), receive))  # type: ignore[arg-type]
    await looked()
    for _ in range(times):
        loop.ahead += seconds
        await looked()
    frames.put_nowait(codec.encode([Close()]))
    return await running


@pytest.mark.parametrize(
    ("seconds", "times", "reason"),
    [(TIMEOUT / 8, 7, ""), (TIMEOUT / 8, 8, "nothing was heard from it for 1000 s"), (5 * TIMEOUT, 1, "")],
    ids=["silent for less than the timeout", "silent for all of it", "this end did not run"],
)
def test_silence_is_counted_while_this_end_listens(seconds: float, times: int, reason: str) -> None:
    loop = Turned()
    try:
        assert loop.run_until_complete(watch(loop, seconds, times)) == reason
    finally:
        loop.close()
