"""The order of messages from one process to another on a different host. They may take two ways: straight, or by the
other host's agent, which spreads messages for several processes. Pure: no socket, no lock.

The sender numbers its messages to each process, whichever way they go; the receiver has a message wait until those
before it are there. Within a host there is one way, and no number.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from monarch.runtime.actors.messages.recent import Recent

M = TypeVar("M")


class Numbers:
    """Of what this process sends, by receiver."""

    def __init__(self) -> None:
        self._of: dict[str, Callable[[], int]] = {}

    def to(self, receiver: str) -> Callable[[], int]:
        """Gives the next number, from 0; for any thread."""
        return self._of.setdefault(receiver, count().__next__)

    def gone(self, receiver: str) -> None:
        """Nothing is sent to it any more."""
        self._of.pop(receiver, None)


class Order(Generic[M]):
    """The messages of each sender, in the order of their numbers."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._waiting: dict[str, dict[int, M]] = {}
        self._unreached: set[str] = set()
        self._ended: Recent[str, None] = Recent()

    def take(self, sender: str, number: int, message: M) -> list[M]:
        """The messages that can be handled once this one has come."""
        due = self._next.get(sender, 0)
        if sender in self._unreached or sender in self._ended:
            return [message]
        if number < due:  # it has come by another way
            return []
        waiting = self._waiting.get(sender)
        if number != due:
            if waiting is None:
                waiting = self._waiting[sender] = {}
            waiting[number] = message
            return []
        ready, due = [message], due + 1
        if waiting is not None:
            while due in waiting:
                ready.append(waiting.pop(due))
                due += 1
            if not waiting:
                del self._waiting[sender]
        self._next[sender] = due
        return ready

    def gone(self, sender: str, ended: bool) -> list[M]:
        """A sender has `ended`, or there is no way to it: missing messages may never come. The messages that waited for
        them; later ones wait for nothing."""
        if ended:
            self._ended[sender] = None
        else:
            self._unreached.add(sender)
        self._next.pop(sender, None)
        waiting = self._waiting.pop(sender, {})
        return [waiting[number] for number in sorted(waiting)]
