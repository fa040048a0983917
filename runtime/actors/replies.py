"""OpenPorts: which replies are still to come to a process, from where, and what happens if they cannot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(frozen=True)
class Arrived(Generic[V]):
    """A reply, or an error instead of one, that is looked at by itself; `place` is where it comes from. `last`: the
    port is closed."""

    port: int
    place: int
    value: V | Exception
    last: bool


@dataclass(frozen=True)
class Complete(Generic[V]):
    """All replies are there, by place. The port is closed."""

    port: int
    values: list[V]


@dataclass(frozen=True)
class Failed:
    """One of the replies that were to come together is an error. The port is closed: the others are not waited for."""

    port: int
    place: int
    error: Exception


Outcome = Arrived[V] | Complete[V] | Failed


class _Open(Generic[V]):
    def __init__(self, sources: Sequence[str] | None, together: bool) -> None:
        self.awaited = dict(enumerate(sources or ()))
        self.count = len(self.awaited)
        self.channel = sources is None
        self.together = together
        self.values: dict[int, V] = {}


class OpenPorts(Generic[V]):
    """The ports of a process at which something is still to arrive, by number. Numbers are never used twice.

    What comes to a port that is closed, or from a place that has answered, is late, and is dropped.
    """

    def __init__(self) -> None:
        self._ports: dict[int, _Open[V]] = {}
        self._next = 1

    def open(self, sources: Sequence[str], *, together: bool = False) -> int:
        """A port for one reply from each place. `sources` are the processes of the places, in order.

        Replies come one by one, as `Arrived`, or `together`, as `Complete`, or `Failed` at the first error.
        """
        return self._add(_Open(sources, together))

    def open_channel(self) -> int:
        """A port for any number of messages, from anywhere, until it is closed."""
        return self._add(_Open(None, together=False))

    def close(self, port: int) -> None:
        """Nobody looks any more: what still comes is dropped."""
        self._ports.pop(port, None)

    def _add(self, opened: _Open[V]) -> int:
        port = self._next
        self._next += 1
        self._ports[port] = opened
        return port

    def arrive(self, port: int, place: int, value: V | Exception) -> list[Outcome[V]]:
        """A reply came, or an error instead of one."""
        found = self._ports.get(port)
        if found is None:
            return []
        if found.channel:
            return [Arrived(port, place, value, last=False)]
        if found.awaited.pop(place, None) is None:
            return []
        last = not found.awaited
        if last or (found.together and isinstance(value, Exception)):
            del self._ports[port]
        if not found.together:
            return [Arrived(port, place, value, last)]
        if isinstance(value, Exception):
            return [Failed(port, place, value)]
        found.values[place] = value
        return [Complete(port, [found.values[place] for place in range(found.count)])] if last else []

    def lost(self, source: str, error: Exception) -> list[Outcome[V]]:
        """A process has ended: what was to come from there will not."""
        outcomes: list[Outcome[V]] = []
        for port, found in list(self._ports.items()):
            for place in [place for place, at in found.awaited.items() if at == source]:
                outcomes += self.arrive(port, place, error)
        return outcomes

    def __len__(self) -> int:
        return len(self._ports)
