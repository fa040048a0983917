"""Actors that wait for each other: one call of a circle fails, and nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import monarch.config
from monarch.actor import Actor, ActorError, Channel, Port, SupervisionError, concurrent_endpoint, endpoint, this_host
from tests.runtime.actors.conftest import WAIT


class Asks(Actor):
    """Asks those that it was told of, one after the other: the first asks the second, and so on."""

    @endpoint
    def ask(self, others: list[Asks], ready: Port[int] | None = None) -> str:
        if ready is not None:
            ready.send(0)
        return "end" if not others else others[0].ask.call_one(others[1:]).get()

    @endpoint
    def wait(self, seconds: float) -> str:
        threading.Event().wait(seconds)
        return "waited"


class AsksAsync(Actor):
    @endpoint
    async def ask(self, others: list[AsksAsync]) -> str:
        return "end" if not others else await others[0].ask.call_one(others[1:])

    @concurrent_endpoint
    async def beside(self) -> str:
        return "beside"

    @concurrent_endpoint
    async def ask_beside(self, other: AsksAsync, back: AsksAsync) -> str:
        return await other.reach.call_one(back)

    @concurrent_endpoint
    async def reach(self, back: AsksAsync) -> str:
        return await back.beside.call_one()


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    with monarch.config.configured(deadlock_check="100ms"):
        yield


def actors(kind: type[Actor], count: int) -> list[Actor]:
    """So many, each in a process of its own."""
    return [this_host().spawn_procs(name=f"p{at}").spawn(f"a{at}", kind) for at in range(count)]


@pytest.mark.sample()
@pytest.mark.parametrize("kind", [Asks, AsksAsync])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_circle_of_waits_is_an_error(kind: type[Asks], count: int) -> None:
    found = actors(kind, count)
    first = found[0]
    with pytest.raises(ActorError) as raised:
        first.ask.call_one([*found[1:], first]).get(WAIT)  # type: ignore[attr-defined]
    cause: BaseException = raised.value
    while isinstance(cause, ActorError):
        cause = cause.exception
    assert isinstance(cause, SupervisionError)
    assert "never gets an answer: actors wait for each other" in str(cause)
    assert all(f"a{at} waits for a{(at + 1) % count}.ask" in str(cause) for at in range(count))
    assert first.ask.call_one([]).get(WAIT) == "end"  # type: ignore[attr-defined]  # it lives


def test_two_that_ask_each_other_at_once() -> None:
    one, two = actors(Asks, 2)
    port, receiver = Channel[int].open()
    calls = [a.ask.call_one([b], port) for a, b in ((one, two), (two, one))]  # type: ignore[attr-defined]
    answers = [call.exception(WAIT) for call in calls]
    # Either both began before either asked, and one fails while the other is answered, or they came one by one.
    assert sum(error is not None for error in answers) <= 1
    assert receiver.recv().get(WAIT) == 0


def test_long_waits_that_are_no_circle_live_on() -> None:
    one, two, three = actors(Asks, 3)
    assert one.ask.call_one([two, three]).get(WAIT) == "end"  # type: ignore[attr-defined]
    slow = three.wait.call_one(1.0)  # type: ignore[attr-defined]
    chain = one.ask.call_one([two, three])  # type: ignore[attr-defined]
    assert (slow.get(WAIT), chain.get(WAIT)) == ("waited", "end")


def test_endpoints_that_run_beside_others_are_no_circle() -> None:
    one, two = actors(AsksAsync, 2)
    assert one.ask_beside.call_one(two, one).get(WAIT) == "beside"  # type: ignore[attr-defined]
