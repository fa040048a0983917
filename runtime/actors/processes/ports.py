"""Open ports: the answers that a process waits for, from which processes, and their errors when these cannot answer any
more."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar, cast

from monarch.compiler.mesh import Shape
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import ActorError, SupervisionError
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future

T = TypeVar("T")

Decode = Callable[[], Any]


class Answer:
    """A reply as it came: gives its value, or raises its exception. Raises ActorError for one that cannot be read."""

    __slots__ = ("payload", "well", "what")

    def __init__(self, payload: Payload, well: bool) -> None:
        self.payload = payload
        self.well = well
        self.what = ""

    def __call__(self) -> Any:
        try:
            value = self.payload.decode()
        except (MonarchError, OSError, MemoryError):  # of ours, and said there: a message that did not come whole
            raise
        except Exception as error:  # of the user's classes
            raise ActorError.of(error, f"reading here what {self.what or 'was sent'} gave") from error
        if self.well:
            return value
        raise value


def failing(error: Exception) -> Decode:
    def fail() -> Any:
        raise error

    return fail


def _unanswered(why: str, what: str, rank: int | None) -> SupervisionError:
    """The error of a call, such as "trainers.step", whose answer cannot come any more. `rank` is the actor's in the
    mesh as spawned, where that is known."""
    mesh, _, method = what.rpartition(".")
    whose = what if rank is None else f"{mesh}[{rank}].{method}"
    return SupervisionError(f"no answer from {whose}: {why}" if what else f"no answer: {why}", what or None)


def _rank(shape: Shape | None, place: int) -> int | None:
    """The rank of a place of a slice, in the mesh as spawned."""
    return None if shape is None else shape.ranks()[place]


class Waiting(Protocol):
    """The receiver of replies to an open port. Called with the table's lock not held, from any thread."""

    def take(self, place: int, well: bool, decode: Decode) -> bool:
        """A reply, the first from its place or not. True once nothing more is expected: the port is closed then."""

    def lost(self, address: str, why: str) -> bool:
        """A process has ended, and all that it sent before has been taken. True as in `take`."""


class Pending(Protocol):
    """An open port at which answers are expected: which, since when (monotonic clock), and from which processes."""

    what: str
    since: float

    def pending(self) -> Mapping[int, str]: ...


class Ports:
    """The open ports of a process, by number. A number is never used twice: a late reply finds nothing."""

    def __init__(self) -> None:
        self._open: dict[int, Waiting] = {}
        self._numbers = count()

    def open(self, waiting: Waiting) -> int:
        number = next(self._numbers)
        self._open[number] = waiting
        return number

    def close(self, number: int) -> None:
        self._open.pop(number, None)

    def reply(self, number: int, place: int, well: bool, decode: Decode) -> None:
        waiting = self._open.get(number)
        if waiting is not None and waiting.take(place, well, decode):
            self._open.pop(number, None)

    def lost(self, address: str, why: str) -> None:
        for number, waiting in list(self._open.items()):
            if waiting.lost(address, why):
                self._open.pop(number, None)

    def expects(self, address: str) -> bool:
        """Whether an answer of a process is still to come."""
        found = list(self._open.values())
        return any(isinstance(call, (One, _Several)) and address in call.pending().values() for call in found)

    def owners(self, address: str) -> set[str]:
        """The processes that spawned the actors of a process whose answers are still to come."""
        found = list(self._open.values())
        calls = [call for call in found if isinstance(call, (One, _Several)) and call.mesh]
        return {call.mesh.rpartition(".")[0] for call in calls if address in call.pending().values()}

    def calls(self) -> dict[int, Pending]:
        """The calls that have not been answered, by number."""
        found = list(self._open.items())
        return {number: call for number, call in found if isinstance(call, (One, _Several)) and call.what}

    def __len__(self) -> int:
        return len(self._open)


class One(Generic[T]):
    """A reply from one actor, of this mesh, or from a process."""

    __slots__ = ("_address", "_place", "_shape", "future", "mesh", "since", "what")

    def __init__(
        self, address: str, what: str = "", shape: Shape | None = None, place: int = 0, mesh: str = ""
    ) -> None:
        self.future: Future[T] = Future.pending()
        self.mesh = mesh
        self._address = address
        self._shape, self._place = shape, place
        self.what = what
        self.since = monotonic()

    def pending(self) -> Mapping[int, str]:
        return {0: self._address}

    def take(self, place: int, well: bool, decode: Decode) -> bool:
        if isinstance(decode, Answer):
            decode.what = self.what
        self.future.resolve(decode)
        return True

    def lost(self, address: str, why: str) -> bool:
        if address == self._address:
            self.future.fail(_unanswered(why, self.what, _rank(self._shape, self._place)))
        return address == self._address


class _Several:
    """Replies from several places: which are still to come, and from which processes."""

    def __init__(self, addresses: Sequence[str], what: str, mesh: str) -> None:
        self.mesh = mesh
        self._lock = threading.Lock()
        self._waiting: dict[int, str] = dict(enumerate(addresses))
        self.what = what
        self.since = monotonic()

    def pending(self) -> Mapping[int, str]:
        with self._lock:
            return dict(self._waiting)

    def take(self, place: int, well: bool, decode: Decode) -> bool:
        with self._lock:
            if self._waiting.pop(place, None) is None:
                return not self._waiting
            last = not self._waiting
        if isinstance(decode, Answer):
            decode.what = self.what
        return self._took(place, well, decode, last)

    def lost(self, address: str, why: str) -> bool:
        done = False
        for place in [place for place, at in list(self._waiting.items()) if at == address]:
            done = self.take(place, False, failing(_unanswered(why, self.what, self._rank_of(place))))
        return done

    def _rank_of(self, place: int) -> int | None:
        """The rank of a place in the mesh as spawned, where that is known."""
        return None

    def _took(self, place: int, well: bool, decode: Decode, last: bool) -> bool:
        raise NotImplementedError


class All(_Several, Generic[T]):
    """A reply from each place of a shape: their values together, or the first error."""

    def __init__(self, shape: Shape, addresses: Sequence[str], what: str = "", mesh: str = "") -> None:
        super().__init__(addresses, what, mesh)
        self.future: Future[ValueMesh[T]] = Future.pending()
        self._shape = shape
        self._decode: list[Decode] = [failing(SupervisionError("no reply"))] * len(addresses)

    def _rank_of(self, place: int) -> int | None:
        return _rank(self._shape, place)

    def _took(self, place: int, well: bool, decode: Decode, last: bool) -> bool:
        if not well:
            self.future.resolve(decode)
            return True
        self._decode[place] = decode
        if last:
            self.future.resolve(lambda: ValueMesh(self._shape, [cast(T, decode()) for decode in self._decode]))
        return last


class Each(_Several, Generic[T]):
    """A reply from each of several places, in the order in which they come: futures of which the next one is filled."""

    def __init__(self, addresses: Sequence[str], what: str = "", shape: Shape | None = None, mesh: str = "") -> None:
        super().__init__(addresses, what, mesh)
        self._shape = shape
        self._futures: list[Future[T]] = [Future.pending() for _ in addresses]
        self._next = count()

    def _rank_of(self, place: int) -> int | None:
        return _rank(self._shape, place)

    def futures(self) -> Iterator[Future[T]]:
        return iter(self._futures)

    def _took(self, place: int, well: bool, decode: Decode, last: bool) -> bool:
        self._futures[next(self._next)].resolve(decode)
        return last


class _Asked(Future[T]):
    """A future that gives its value back if it goes before anybody looked at it, as after a timeout."""

    __slots__ = ("__weakref__", "_queue")

    def __init__(self, queue: Queue[T]) -> None:
        self._begin()
        self._queue = queue

    def __del__(self) -> None:
        if self._decode is not None:
            self._queue.give_back(self._decode)


class Queue(Generic[T]):
    """The values sent to a channel, in the order in which they came, from all senders."""

    def __init__(self, once: bool) -> None:
        self._once = once
        self._lock = threading.RLock()  # a future may go while this thread has the lock
        self._arrived: deque[Decode] = deque()
        self._asked: deque[weakref.ref[_Asked[T]]] = deque()

    def take(self, place: int, well: bool, decode: Decode) -> bool:
        self._arrived.append(decode)
        self._join()
        return self._once

    def lost(self, address: str, why: str) -> bool:
        return False

    def ask(self) -> Future[T]:
        """A future of the next value that no earlier future waits for."""
        future = _Asked(self)
        self._asked.append(weakref.ref(future))
        self._join()
        return future

    def give_back(self, decode: Decode) -> None:
        self._arrived.appendleft(decode)
        self._join()

    def _join(self) -> None:
        with self._lock:
            while self._arrived and self._asked:
                future = self._asked.popleft()()
                if future is not None:
                    future.resolve(self._arrived.popleft())


__all__ = ["All", "Answer", "Decode", "Each", "One", "Pending", "Ports", "Queue", "Waiting", "failing"]
