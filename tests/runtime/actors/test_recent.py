"""A process remembers what has ended in a bounded space, and loses no answer by that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.actor import Actor, SupervisionError, endpoint, this_host, this_proc
from monarch.runtime.actors.messages import recent
from monarch.runtime.actors.messages.address import new_address
from monarch.runtime.actors.messages.message import EMPTY, NO_ARGUMENTS
from monarch.runtime.actors.messages.protocol import CALL, STOP
from monarch.runtime.actors.messages.recent import Ended, Recent
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes import process as process_of_actors
from monarch.runtime.actors.processes.ports import One
from tests.runtime.actors.conftest import WAIT

FEW, MORE = 3, 8


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MOST", FEW)


def test_the_newest_entries_are_kept() -> None:
    kept: Recent[int, str] = Recent()
    for number in range(MORE):
        kept[number] = str(number)
    assert kept == {5: "5", 6: "6", 7: "7"}


@given(st.sets(st.integers(0, 100)), st.sets(st.integers(0, 100)))
def test_each_that_has_ended_is_known_until_who_numbered_it_has(ours: set[int], theirs: set[int]) -> None:
    ended = Ended()
    for creator, numbers in (("a.b", ours), ("c", theirs)):
        for number in numbers:
            ended.add(f"{creator}.{number}")
    assert {number for number in range(200) if f"a.b.{number}" in ended} == ours
    ended.forget("a.b")
    assert not any(f"a.b.{number}" in ended for number in range(200))
    assert {number for number in range(200) if f"c.{number}" in ended} == theirs


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def test_many_processes_leave_no_more_than_the_newest_ends() -> None:
    ended = []
    for number in range(MORE):
        procs = this_host().spawn_procs()
        echo = procs.spawn("echo", Echo)
        assert echo.echo.call_one(number).get(WAIT) == number
        procs.stop().get(WAIT)
        ended.append(echo)
    process = current.process()
    alive = this_host().spawn_procs().spawn("echo", Echo)
    assert alive.echo.call_one(1).get(WAIT) == 1
    assert len(process.dead) == FEW and len(process.router.peers) == 1
    for echo in ended:
        with pytest.raises(SupervisionError, match="'echo.echo' cannot be called: its process"):
            echo.echo.call_one(1).get(WAIT)
        with pytest.raises(SupervisionError):
            echo.echo.broadcast(1)
    assert len(process.dead) == FEW and len(process.router.peers) == 1


def test_many_actors_leave_no_more_than_the_newest_ends() -> None:
    process, ended = current.process(), []
    for number in range(MORE):
        echo = this_proc().spawn(f"echo{number}", Echo)
        assert echo.echo.call_one(number).get(WAIT) == number
        echo.stop("enough").get(WAIT)
        ended.append(echo)
    assert not process.actors and len(process.ended) == len(process.refused) == FEW
    for number, echo in enumerate(ended):
        known = f"'echo{number}.* takes no more messages: enough" if number >= MORE - FEW else "it has ended"
        with pytest.raises(SupervisionError, match=known):
            echo.echo.call_one(1).get(WAIT)
        echo.stop().get(WAIT)
        process.router.send(process.address, (STOP, echo.id, None, "its owner has ended"), EMPTY)


def test_a_call_of_an_actor_whose_creator_is_no_more_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody tells this process of an end that was before its time."""
    monkeypatch.setattr(process_of_actors, "EARLY_SECONDS", 0.01)
    process, waiting = current.process(), One[int]("nobody")
    reply = process.address, process.ports.open(waiting), 0
    process.router.send(process.address, (CALL, f"{new_address()}.0", reply, "echo", False, None), NO_ARGUMENTS)
    with pytest.raises(SupervisionError, match="its spawner ended before that"):
        waiting.future.get(WAIT)
