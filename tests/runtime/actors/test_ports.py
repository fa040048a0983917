"""The table of open ports: replies, late replies, and processes that end before they answer."""

from __future__ import annotations

import asyncio
import gc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monarch.compiler.mesh import Shape
from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.processes.ports import All, Decode, Each, One, Ports, Queue, failing
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future

ADDRESSES = ("a", "b", "c")


def says(value: object) -> Decode:
    return lambda: value


def same(found: object, value: object) -> bool:
    """Whether it is what came, or says the same of an end: that error is made for each port."""
    ended = isinstance(found, SupervisionError) and isinstance(value, SupervisionError)
    return str(found) == str(value) if ended else found is value


class Asked:
    """What a model knows of one port: who is to answer, and what came, as values or as errors."""

    def __init__(self, kind: str, addresses: list[str], futures: list[Future[object]]) -> None:
        self.kind = kind
        self.waiting = dict(enumerate(addresses))
        self.futures = futures
        self.came: list[tuple[int, object]] = []

    @property
    def closed(self) -> bool:
        failed = self.kind == "all" and any(isinstance(value, Exception) for _, value in self.came)
        return not self.waiting or failed

    def arrive(self, place: int, value: object) -> None:
        if not self.closed and self.waiting.pop(place, None) is not None:
            self.came.append((place, value))


class Model(RuleBasedStateMachine):
    """Replies come from any place, more than once, late, or never: then the process' end comes, once."""

    def __init__(self) -> None:
        super().__init__()
        self.ports = Ports()
        self.asked: dict[int, Asked] = {}
        self.gone: set[str] = set()
        self.number = 0

    @precondition(lambda self: len(self.gone) < 2)
    @rule(kind=st.sampled_from(["one", "all", "each"]), data=st.data())
    def ask(self, kind: str, data: st.DataObject) -> None:
        alive = [address for address in ADDRESSES if address not in self.gone]
        count = 1 if kind == "one" else data.draw(st.integers(1, 4))
        addresses = data.draw(st.lists(st.sampled_from(alive), min_size=count, max_size=count))
        if kind == "one":
            one: One[object] = One(addresses[0])
            port, futures = self.ports.open(one), [one.future]
        elif kind == "all":
            every: All[object] = All(Shape.of({"x": count}), addresses)
            port, futures = self.ports.open(every), [every.future]  # type: ignore[list-item]
        else:
            each: Each[object] = Each(addresses)
            port, futures = self.ports.open(each), list(each.futures())
        assert port not in self.asked
        self.asked[port] = Asked(kind, addresses, futures)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), well=st.booleans())
    def reply(self, data: st.DataObject, well: bool) -> None:
        """One that was waited for, or is late, or is there twice."""
        port = data.draw(st.sampled_from(sorted(self.asked)))
        place = 0 if self.asked[port].kind == "one" else data.draw(st.integers(0, len(self.asked[port].futures) - 1))
        self.number += 1
        value = self.number if well else KeyError(self.number)
        self.asked[port].arrive(place, value)
        self.ports.reply(port, place, well, failing(value) if isinstance(value, Exception) else says(value))

    @rule(address=st.sampled_from(ADDRESSES))
    def lose(self, address: str) -> None:
        if address in self.gone:
            return
        self.gone.add(address)
        error = SupervisionError(f"no answer: {address} ended")
        for asked in self.asked.values():
            for place in [place for place, at in asked.waiting.items() if at == address]:
                asked.arrive(place, error)
        self.ports.lost(address, f"{address} ended")

    @rule(number=st.integers(1000, 2000))
    def reply_to_nothing(self, number: int) -> None:
        self.ports.reply(number, 0, True, says("nobody asked"))

    @invariant()
    def futures_hold_what_came(self) -> None:
        for asked in self.asked.values():
            if asked.kind == "all":
                self.check_all(asked)
                continue
            for future, (_, value) in zip(asked.futures, asked.came, strict=False):
                assert same(future.exception(0) or future.get(0), value)
            assert not any(future.done() for future in asked.futures[len(asked.came) :])

    def check_all(self, asked: Asked) -> None:
        [future] = asked.futures
        assert future.done() == asked.closed
        if future.done():
            errors = [value for _, value in asked.came if isinstance(value, Exception)]
            found = future.exception(0) or future.get(0)
            if errors:
                assert same(found, errors[0])
            else:
                assert isinstance(found, ValueMesh)
                assert list(found.values()) == [value for _, value in sorted(asked.came)]  # type: ignore[type-var]

    @invariant()
    def only_what_is_waited_for_is_open(self) -> None:
        assert len(self.ports) == sum(not asked.closed for asked in self.asked.values())


TestPorts = Model.TestCase


def test_a_channel_gives_values_in_the_order_in_which_they_came() -> None:
    ports = Ports()
    queue: Queue[int] = Queue(once=False)
    port = ports.open(queue)
    early = queue.ask()
    for value in (1, 2, 3):
        ports.reply(port, 0, True, says(value))
    assert [early.get(0), queue.ask().get(0), queue.ask().get(0)] == [1, 2, 3]
    late = queue.ask()
    assert not late.done()
    ports.lost("a", "gone")  # others may send still
    ports.reply(port, 0, True, says(4))
    assert late.get(0) == 4


def test_a_channel_for_one_value_is_closed_by_it() -> None:
    ports = Ports()
    queue: Queue[int] = Queue(once=True)
    port = ports.open(queue)
    ports.reply(port, 0, True, says(1))
    ports.reply(port, 0, True, says(2))
    assert queue.ask().get(0) == 1
    assert not queue.ask().done() and len(ports) == 0


def test_who_gave_up_takes_no_value() -> None:
    ports = Ports()
    queue: Queue[int] = Queue(once=False)
    port = ports.open(queue)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            queue.ask().get(timeout=0)
    kept = queue.ask()
    with pytest.raises(TimeoutError):
        kept.get(timeout=0)
    ports.reply(port, 0, True, says(1))
    ports.reply(port, 0, True, says(2))
    assert (queue.ask().get(0), kept.get(0)) == (2, 1)


def test_a_value_that_nobody_looked_at_is_there_for_the_next() -> None:
    ports = Ports()
    queue: Queue[int] = Queue(once=False)
    port = ports.open(queue)
    for value in (1, 2):
        ports.reply(port, 0, True, says(value))
    queue.ask()
    assert [queue.ask().get(0), queue.ask().get(0)] == [1, 2]


def test_who_gave_up_in_a_coroutine_takes_no_value_either() -> None:
    ports = Ports()
    queue: Queue[int] = Queue(once=False)
    port = ports.open(queue)

    async def main() -> list[int]:
        gc.disable()
        for _ in range(2):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(queue.ask().as_asyncio(), 0.001)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_awaited(queue.ask()), 0.001)
        gc.enable()
        gc.collect()
        waiting = queue.ask().as_asyncio()
        gc.collect()
        for value in (1, 2):
            ports.reply(port, 0, True, says(value))
        return [await waiting, await queue.ask()]

    assert asyncio.run(main()) == [1, 2]


async def _awaited(future: Future[int]) -> int:
    return await future
