"""Errors of actors: what they say, and that they survive pickling."""

from __future__ import annotations

import pickle
import threading

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import ActorError, MeshFailure, OpaqueError, SupervisionError


class Unpicklable(Exception):
    def __init__(self, what: str, more: object) -> None:
        super().__init__(what)
        self.more = more


class Unreadable(Exception):
    """Pickled without complaint, but its constructor wants two arguments and gets one."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


def caught(error: Exception) -> ActorError:
    def step() -> None:
        raise error

    try:
        step()
    except Exception as raised:
        return ActorError.of(raised, "trainer[3].step")
    raise AssertionError


def test_an_actor_error_has_the_exception_and_its_traceback() -> None:
    for error in (caught(ValueError("bad batch")), pickle.loads(pickle.dumps(caught(ValueError("bad batch"))))):
        assert isinstance(error, MonarchError)
        assert isinstance(error.exception, ValueError) and error.exception.args == ("bad batch",)
        lines = str(error).splitlines()
        assert lines[0] == "trainer[3].step raised ValueError: bad batch"
        assert "Remote traceback:" in lines and "in step" in str(error) and "raise error" in str(error)


@pytest.mark.parametrize("error", [Unpicklable("no file", threading.Lock()), Unreadable("no file", 3)])
def test_an_exception_that_cannot_be_sent_is_stood_for(error: Exception) -> None:
    sent = pickle.loads(pickle.dumps(caught(error)))
    assert isinstance(sent.exception, OpaqueError)
    assert "no file" in str(sent.exception) and type(error).__name__ in str(sent.exception)
    assert "no file" in str(sent) and "raise error" in str(sent)


def test_a_supervision_error_names_the_endpoint() -> None:
    error = pickle.loads(pickle.dumps(SupervisionError("'trainer' was stopped", "trainer.step")))
    assert (str(error), error.endpoint) == ("'trainer' was stopped", "trainer.step")
    assert isinstance(error, RuntimeError)


def test_a_failure_tells_the_whole_story() -> None:
    killed = MeshFailure("m1", "worker", 2, "its process was killed by signal 9", -9, ("loading", "step 1"))
    failure = MeshFailure("m0", "boss", 0, "it did not handle the failure of worker", cause=killed)
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert str(failure).splitlines() == [
        "MeshFailure: boss[0]: it did not handle the failure of worker",
        "which happened because of",
        "  worker[2]: its process was killed by signal 9",
        "  its last lines were:",
        "      loading",
        "      step 1",
    ]
