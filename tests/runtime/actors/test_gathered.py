"""When an agent sends on what the processes of its host answer to a call from another host."""

from __future__ import annotations

import pytest
import torch

from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.message import EMPTY, INLINE, Payload
from monarch.runtime.actors.messages.protocol import REPLIES, REPLY, Head
from monarch.runtime.actors.processes.ports import Answer
from monarch.runtime.actors.processes.spreading import Gathered


class Agent:
    """Keeps what it sends."""

    def __init__(self) -> None:
        self.router = self
        self.sent: list[Head] = []

    def send(self, to: str, head: Head, payload: Payload) -> bool:
        assert to == "caller"
        self.sent.append(head)
        return True


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def answers(agent: Agent) -> Gathered:
    return Gathered(agent, "caller", 7, {0: "a", 1: "b", 2: "c"})  # type: ignore[arg-type]


def says(value: object, well: bool = True) -> Answer:
    return Answer(Payload.of(value), well)


def data(value: object) -> bytes | None:
    return Payload.of(value).data


def test_they_go_together_once_all_are_there(agent: Agent, answers: Gathered) -> None:
    assert not answers.take(1, True, says("one")) and not answers.take(0, True, says("nought"))
    assert not answers.take(1, True, says("again")) and agent.sent == []
    assert answers.take(2, True, Answer(EMPTY, True))
    assert agent.sent == [(REPLIES, 7, ((1, data("one")), (0, data("nought")), (2, EMPTY.data)))]


def test_errors_and_what_is_large_go_at_once(agent: Agent, answers: Gathered) -> None:
    assert not answers.take(0, True, says(torch.zeros(1 << 20)))
    assert not answers.take(1, False, says(SupervisionError("gone"), False))
    assert agent.sent == [(REPLY, 7, 0, True), (REPLY, 7, 1, False)]
    assert answers.take(2, True, says(2)) and agent.sent[2:] == [(REPLIES, 7, ((2, data(2)),))]


def test_more_than_fits_into_one_message_goes_in_several(agent: Agent, answers: Gathered) -> None:
    half = b"x" * (INLINE * 3 // 5)
    for place in range(3):
        answers.take(place, True, says(half))
    assert [[place for place, _ in head[2]] for head in agent.sent] == [[0, 1], [2]]


def test_what_is_late_keeps_nothing_back(agent: Agent, answers: Gathered) -> None:
    answers.take(0, True, says(0))
    answers.wait_no_more()
    assert agent.sent == [(REPLIES, 7, ((0, data(0)),))]
    assert not answers.take(1, True, says(1)) and agent.sent[1:] == [(REPLIES, 7, ((1, data(1)),))]


def test_a_death_sends_on_what_was_answered_before(agent: Agent, answers: Gathered) -> None:
    answers.take(0, True, says(0))
    assert not answers.lost("a", "gone")
    assert agent.sent == [(REPLIES, 7, ((0, data(0)),))]
    assert not answers.lost("b", "gone") and answers.lost("c", "gone")
    assert len(agent.sent) == 1


def test_nobody_waits_when_the_caller_has_ended(agent: Agent, answers: Gathered) -> None:
    answers.take(0, True, says(0))
    assert answers.lost("caller", "gone") and agent.sent == []
