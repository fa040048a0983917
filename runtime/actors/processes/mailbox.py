"""Mailbox: the order in which an actor handles its messages. Pure: no lock, no thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from monarch.runtime.actors.errors import MeshFailure

M = TypeVar("M")


@dataclass(frozen=True)
class Stop:
    """The actor is to end: taken once, after all messages that were there before it."""

    reason: str


class Mailbox(Generic[M]):
    """Messages in the order in which they came; failures of meshes that the actor owns go before them.

    A stop waits for the messages that came before it. Later ones are refused.
    """

    def __init__(self) -> None:
        self._failures: deque[MeshFailure] = deque()
        self._messages: deque[M] = deque()
        self._stop: Stop | None = None
        self._closed = False

    def put(self, message: M) -> bool:
        """Whether it was taken in: not behind a stop, nor when the mailbox is closed."""
        if self._closed or self._stop is not None:
            return False
        self._messages.append(message)
        return True

    def put_failure(self, failure: MeshFailure) -> bool:
        """Whether it was taken in: also behind a stop, until the mailbox is closed."""
        if self._closed:
            return False
        self._failures.append(failure)
        return True

    def stop(self, reason: str) -> None:
        """Ask the actor to end. The first reason counts."""
        if self._stop is None:
            self._stop = Stop(reason)

    def take(self) -> MeshFailure | M | Stop | None:
        """The next item, or None. After a stop was taken the mailbox is closed."""
        if self._closed:
            return None
        if self._failures:
            return self._failures.popleft()
        if self._messages:
            return self._messages.popleft()
        if self._stop is not None:
            self._closed = True
        return self._stop

    def take_failure(self) -> MeshFailure | None:
        """The next failure, while a message is being handled."""
        return self._failures.popleft() if self._failures and not self._closed else None

    def messages(self) -> tuple[M, ...]:
        """The messages that wait."""
        return tuple(self._messages)

    def close(self) -> list[M]:
        """The actor has ended: the messages that it never took, which are to be answered with an error."""
        self._closed = True
        left, self._messages = list(self._messages), deque()
        self._failures.clear()
        return left

    def __len__(self) -> int:
        return len(self._failures) + len(self._messages) + (self._stop is not None and not self._closed)
