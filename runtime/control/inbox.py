"""From the event loop to a thread that takes its time, and from threads to the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from monarch.runtime.control import limits
from monarch.runtime.control.loop import control_loop, soon

T = TypeVar("T")


class Inbox(Generic[T]):
    """Filled in the loop, emptied by one thread. `full` once more than `limit` bytes wait in it."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limits.QUEUE_BYTES if limit is None else limit
        self._queue: queue.SimpleQueue[tuple[T, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._room = asyncio.Event()
        self._room.set()
        self.taken = time.monotonic()

    def put(self, item: T, cost: int = limits.RECORD_COST) -> None:
        with self._lock:
            if not self._waiting:
                self.taken = time.monotonic()
            self._waiting += cost
            if self._waiting > self._limit:
                self._room.clear()
        self._queue.put((item, cost))

    def take(self) -> T:
        """The next item, once there is one."""
        item, cost = self._queue.get()
        with self._lock:
            was_full = self._waiting > self._limit
            self._waiting -= cost
            self.taken = time.monotonic()
            if was_full and self._waiting <= self._limit:
                soon(self._let_in)
        return item

    def _let_in(self) -> None:
        with self._lock:
            if self._waiting <= self._limit:
                self._room.set()

    @property
    def full(self) -> bool:
        return not self._room.is_set()

    def abandon(self) -> None:
        """From the thread that took from it: it does so no longer, and nobody has to wait for room."""
        with self._lock:
            self._limit = 1 << 62
        soon(self._room.set)

    def discard(self) -> None:
        """The rest of its items must not be taken any more."""
        with suppress(queue.Empty):
            while True:
                _, cost = self._queue.get_nowait()
                with self._lock:
                    self._waiting -= cost
        self._let_in()

    async def room(self) -> None:
        await self._room.wait()


class Handoff(Generic[T]):
    """Filled by any thread, emptied in the loop; many items at once cost one wake-up. `put` waits while `limit` bytes
    are not released: items that the loop takes count until it calls `release`. Where Ctrl-C comes in `put`, the item
    goes or not, and no other waits for it."""

    def __init__(self, take: Callable[[list[T]], None], limit: int | None = None) -> None:
        self._take = take
        self._limit = limits.QUEUE_BYTES if limit is None else limit
        self._items: list[T] = []
        self._lock = threading.RLock()  # Ctrl-C can leave a Condition's __enter__ with it
        self._condition = threading.Condition(self._lock)
        self._held = 0
        self._given = 0
        self._ended = False

    def put(self, item: T, cost: int, seconds: float) -> bool:
        """False where there was no room for that long."""
        with self._lock:
            if not self._condition.wait_for(lambda: self._ended or self._held <= self._limit, seconds):
                return False
            if not self._items:  # before there is one: what nobody was called for would wait for ever
                control_loop().call_soon_threadsafe(self._deliver)
            self._held += cost
            self._items.append(item)
        return True

    def _deliver(self) -> None:
        with self._lock:
            items, self._items = self._items, []
            self._given = self._held
        self._take(items)

    def release(self) -> None:
        """In the loop: all items so far have found their places."""
        with self._lock:
            self._held -= self._given
            self._given = 0
            self._condition.notify_all()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._condition.notify_all()
