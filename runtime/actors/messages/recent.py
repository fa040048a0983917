"""A process's memory of ended processes and actors, in a bounded space: a program that runs for months ends many
processes and actors, and their addresses and ids are never used again.

It forgets the cause of an old end, not the end: the kernel, or the agent of another host, says that no process has an
address any more, and `Ended` has a bit for each actor.
"""

from __future__ import annotations

import threading
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST = 1000


class Recent(dict[K, V]):
    """A dict of the newest entries that were set, at most `MOST`. Entries may be set by any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._setting = threading.Lock()

    def __setitem__(self, key: K, value: V) -> None:
        with self._setting:
            super().__setitem__(key, value)
            if len(self) > MOST:
                del self[next(iter(self))]


class Ended:
    """Which of the things that processes have numbered, "ADDRESS.NUMBER", have ended: a bit for each."""

    def __init__(self) -> None:
        self._of: dict[str, bytearray] = {}

    def add(self, id: str) -> None:
        creator, _, number = id.rpartition(".")
        at, bit = divmod(int(number), 8)
        bits = self._of.setdefault(creator, bytearray())
        bits.extend(bytes(max(0, at + 1 - len(bits))))
        bits[at] |= 1 << bit

    def __contains__(self, id: str) -> bool:
        creator, _, number = id.rpartition(".")
        at, bit = divmod(int(number), 8)
        bits = self._of.get(creator, b"")
        return at < len(bits) and bool(bits[at] >> bit & 1)

    def forget(self, creator: str) -> None:
        """The process that numbered them has ended."""
        self._of.pop(creator, None)
