"""A stream that goes on over a new connection: the frames of both directions, counted. No I/O.

The frames of each direction are counted from 0, over all connections of the stream. An end keeps its frames until the
other one has taken them, which says with each frame of its own how many it has taken. An end that has
`limits.KEPT_BYTES` of such frames makes no more until the other end has taken some; an end that has taken a quarter of
that and sent nothing since says so. Where a connection breaks, the one that opened it opens another. In its handshake
each end says how many frames it has taken, and the other sends on from there. So each frame is taken once, and in
order.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from monarch.runtime.control import limits
from monarch.runtime.control.records import Malformed

Frame = TypeVar("Frame")


class Frames(Generic[Frame]):
    """Those of one stream, as one of its ends knows them. `taken` is how many of the other end's it has taken."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limits.KEPT_BYTES if limit is None else limit
        self._kept: deque[tuple[Frame, int]] = deque()
        self._bytes = 0
        self._first = 0  # the number of the first that is kept
        self._written = 0  # how many of the kept were written on this connection
        self.taken = 0
        self._unsaid_bytes = 0

    # -- sending -------------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether no more are to be made before the other end has some of those that are kept."""
        return self._bytes > self._limit

    @property
    def written(self) -> bool:
        """Whether all were written on this connection."""
        return self._written == len(self._kept)

    def put(self, frame: Frame, size: int) -> None:
        """One more is to be sent, of so many bytes."""
        self._kept.append((frame, size))
        self._bytes += size

    def next(self) -> Frame:
        """The next one to be written on this connection."""
        self._written += 1
        return self._kept[self._written - 1][0]

    def acknowledged(self, count: int) -> None:
        """The other end has taken so many in all. Raises Malformed where that cannot be."""
        if not self._first <= count <= self._first + len(self._kept):
            known = f"{self._first} to {self._first + len(self._kept)}"
            raise Malformed(f"it says that it has taken {count} frames, where it can have taken {known}")
        self._written = max(0, self._written - (count - self._first))
        while self._first < count:
            self._bytes -= self._kept.popleft()[1]
            self._first += 1

    # -- taking --------------------------------------------------------------------------------------------------------

    def take(self, size: int) -> None:
        """One of the other end's has come, of so many bytes."""
        self.taken += 1
        self._unsaid_bytes += size

    @property
    def due(self) -> bool:
        """Whether this end has to send how many it has taken, though it has nothing else to send."""
        return self._unsaid_bytes > self._limit // 4

    def say(self) -> int:
        """How many were taken, for the frame that says so to the other end."""
        self._unsaid_bytes = 0
        return self.taken

    # -- a new connection ----------------------------------------------------------------------------------------------

    def go_on(self, taken: int) -> None:
        """There is another connection, and the other end has taken so many frames. Raises Malformed."""
        self.acknowledged(taken)
        self._written = 0
