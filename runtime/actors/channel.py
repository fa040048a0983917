"""Channels: a port that any process can send to, and a receiver that gives the values sent."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from monarch.runtime.actors.messages.protocol import ReplyTo
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.ports import Ports, Queue
from monarch.runtime.future import Future

T = TypeVar("T")


class Port(Generic[T]):
    """Where values are sent to, from any thread of any process: a port can be passed in messages and pickled."""

    __slots__ = ("_of", "_to")

    def __init__(self, to: ReplyTo | None, of: str = "") -> None:
        self._to = to
        self._of = of
        """The endpoint that answers by it, such as "trainer[3].step", in the actor that has the call."""

    @property
    def address(self) -> str | None:
        """The process that has its receiver; None for a port to nowhere."""
        return None if self._to is None else self._to[0]

    def send(self, value: T) -> None:
        """Send it, without waiting. A value for a closed port is dropped."""
        if self._to is not None:
            current.process().reply(self._to, True, value)

    def exception(self, error: Exception) -> None:
        """Have it raised where the value is looked at: as ActorError, with its traceback, if it is none already."""
        if self._to is not None:
            current.process().raise_at(self._to, error, self._of or current.context().actor_instance.label)

    def __reduce__(self) -> tuple[type[Port[Any]], tuple[ReplyTo | None]]:
        return Port, (self._to,)

    def __repr__(self) -> str:
        return f"<port {self._to}>"


class PortReceiver(Generic[T]):
    """The other end of a port, in the process that opened the channel. Futures are filled in the order asked for."""

    def __init__(self, ports: Ports, number: int, queue: Queue[T]) -> None:
        self._ports = ports
        self._number = number
        self._queue = queue

    def recv(self) -> Future[T]:
        """A future of the next value. Values of one sender come in the order sent."""
        return self._queue.ask()

    def close(self) -> None:
        """Take no more."""
        self._ports.close(self._number)

    def __del__(self) -> None:
        self.close()


class Channel(Generic[T]):
    """`port, receiver = Channel[int].open()`"""

    @classmethod
    def open(cls, once: bool = False) -> tuple[Port[T], PortReceiver[T]]:
        """A port and its receiver. With `once=True` it takes one value, and is closed then."""
        process = current.process()
        queue: Queue[T] = Queue(once)
        number = process.ports.open(queue)
        return Port((process.address, number, 0)), PortReceiver(process.ports, number, queue)
