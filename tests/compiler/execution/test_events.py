"""Events: who subscribes hears them, in order, and nobody else is asked; what people read is printed as before."""

from __future__ import annotations

import pytest

from monarch.compiler.config import configured
from monarch.compiler.errors import DeviceMeshError
from monarch.compiler.execution.events import Event, Failure, Log, heard, say, subscribe, tell, wanted
from monarch.compiler.types import MeshSpec


def test_a_sink_hears_the_kinds_that_it_has_subscribed_to_until_it_stops() -> None:
    first: list[Event] = []
    second: list[Event] = []
    failure, log = Failure(MeshSpec.of(a=2), DeviceMeshError("gone")), Log("plan", "text")
    stop = subscribe(first.append, Failure, Log)
    other = subscribe(second.append, Failure)
    tell(failure)
    tell(log)
    stop()
    stop()
    tell(failure)
    assert heard(Failure) and not heard(Log)
    other()
    tell(failure)
    assert first == [failure, log] and second == [failure, failure]
    assert not heard(Failure)


def test_a_sink_that_has_subscribed_twice_hears_twice_and_stops_once() -> None:
    found: list[Event] = []
    stops = [subscribe(found.append, Log) for _ in range(2)]
    tell(Log("plan", "text"))
    stops[0]()
    tell(Log("plan", "text"))
    stops[1]()
    assert len(found) == 3


def test_what_a_sink_raises_reaches_whoever_tells() -> None:
    def sink(event: Event) -> None:
        raise KeyError("sink")

    stop = subscribe(sink, Log)
    try:
        with pytest.raises(KeyError, match="sink"):
            tell(Log("plan", "text"))
    finally:
        stop()


def test_lines_are_printed_on_request_and_told_to_whoever_hears(capsys: pytest.CaptureFixture[str]) -> None:
    assert not wanted("passes") and wanted("kernels")
    say("passes", "first")
    say("kernels", "second")
    with configured(log="passes"):
        assert wanted("passes") and not wanted("plan")
        say("passes", "third")
    found: list[Event] = []
    stop = subscribe(found.append, Log)
    assert wanted("passes")
    say("passes", "fourth")
    stop()
    assert capsys.readouterr().err == "monarch: second\nmonarch: third\n"
    assert found == [Log("passes", "fourth")]
