"""The I/O thread of an endpoint: who waits for it hears of its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import loop as loops
from monarch.runtime.transport import stream
from monarch.runtime.transport.loop import Loop


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(loops, "LOOK_SECONDS", 0.01)
    made = Loop("monarch test")
    yield made
    made.close()


def test_a_call_gives_what_it_gives_and_raises_what_it_raises(loop: Loop) -> None:
    assert loop.run(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        loop.run(lambda: 1 // 0)
    assert loop.run(lambda: 1) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_for_a_thread_that_has_ended_is_told(loop: Loop) -> None:
    """Nothing of ours ends it, so a call that does stands for a defect; without a look the wait would have no end."""

    def end() -> None:
        raise SystemExit

    loop.call(end)
    with pytest.raises(MonarchError, match="the thread monarch test has ended"):
        loop.run(lambda: 1)
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_for_the_end_of_a_link_does_not_wait_for_ever_for_a_thread_that_has_ended(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "CLOSING", 0.01)
    peer = SimpleNamespace(process="12345678")
    ends = SimpleNamespace(peer=peer, messages=0, regions=None, loop=loop, ended=lambda link, error: None)
    socket: Any = SimpleNamespace(ends=ends, greedy=False, fileno=lambda: -1, send=None, shutdown=lambda: None)
    link = stream.StreamLink(socket, "tcp")

    def end() -> None:
        raise SystemExit

    loop.call(end)
    link.await_end(0.01)
    assert "<link to process 12345678 over tcp> was closed 0.01 s ago, and its socket is not given back" in caplog.text


def test_calls_that_were_asked_for_before_the_end_are_done(loop: Loop) -> None:
    goes_on, found = threading.Event(), []
    loop.call(goes_on.wait)
    waiting = threading.Thread(target=lambda: found.append(loop.run(lambda: 1)))
    waiting.start()
    goes_on.set()
    waiting.join()
    loop.close()
    assert found == [1]
    assert loop.run(lambda: 2) == 2
