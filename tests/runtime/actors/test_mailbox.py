"""Mailboxes, against a list that says what is to come out."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from monarch.runtime.actors.errors import MeshFailure
from monarch.runtime.actors.processes.mailbox import Mailbox, Stop


def failure(number: int) -> MeshFailure:
    return MeshFailure(f"m{number}", "worker", number, "it raised")


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.mailbox: Mailbox[int] = Mailbox()
        self.messages: list[int] = []
        self.failures: list[MeshFailure] = []
        self.stop_asked = ""
        self.closed = False
        self.number = 0

    @rule()
    def put(self) -> None:
        self.number += 1
        taken = self.mailbox.put(self.number)
        assert taken == (not self.closed and not self.stop_asked)
        if taken:
            self.messages.append(self.number)

    @rule()
    def fail(self) -> None:
        self.number += 1
        taken = self.mailbox.put_failure(failure(self.number))
        assert taken == (not self.closed)
        if taken:
            self.failures.append(failure(self.number))

    @rule(reason=st.sampled_from(["first", "second"]))
    def stop(self, reason: str) -> None:
        self.mailbox.stop(reason)
        self.stop_asked = self.stop_asked or reason

    @rule()
    def take(self) -> None:
        taken = self.mailbox.take()
        if self.closed:
            assert taken is None
        elif self.failures:
            assert taken == self.failures.pop(0)
        elif self.messages:
            assert taken == self.messages.pop(0)
        elif self.stop_asked:
            assert taken == Stop(self.stop_asked)
            self.closed = True
        else:
            assert taken is None

    @rule()
    def close(self) -> None:
        assert self.mailbox.close() == self.messages
        self.messages, self.failures, self.closed = [], [], True

    @invariant()
    def length(self) -> None:
        waiting = bool(self.stop_asked) and not self.closed
        assert len(self.mailbox) == len(self.messages) + len(self.failures) + waiting


TestMailbox = Model.TestCase
