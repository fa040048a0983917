"""The injector of interrupts: it comes to every point at which Python runs a signal's handler, and to no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from monarch.testing import chaos

HERE = (__file__,)


def work() -> list[str]:
    seen = []
    one, two = 1, 2  # no call: nothing comes between the two
    for _ in range(2):
        seen.append("call")
    one, two = two, one
    return seen


def test_points_are_where_functions_begin_behind_calls_and_where_loops_go_back() -> None:
    with chaos.interrupt(-1, within=HERE) as points:
        work()
    assert points.where is None
    # Of work: its begin, the call of range, and in two rounds each a call and the way back. Of this: work's return.
    lines = []
    for at in range(points.passed):
        with pytest.raises(KeyboardInterrupt), chaos.interrupt(at, within=HERE) as found:
            work()
        assert found.where is not None
        lines.append(int(found.where.split(":")[-1].split(" ")[0]) - work.__code__.co_firstlineno)
    assert lines == [1, 3, 4, 3, 4, 3]


def test_no_point_is_where_an_error_comes_to_a_generator() -> None:
    def generator() -> Iterator[None]:
        try:
            yield
        except ValueError:
            yield

    given = generator()
    next(given)
    error = ValueError()
    with chaos.interrupt(-1, within=HERE) as points:
        given.throw(error)
    assert points.passed == 0


def test_an_error_comes_from_the_call_behind_which_its_handler_runs() -> None:
    lock = threading.Lock()

    def locked() -> int:
        with lock:
            return len("held")

    with chaos.interrupt(-1, within=HERE) as points:
        locked()
    assert points.passed > 0
    for at in range(points.passed):
        with pytest.raises(KeyboardInterrupt), chaos.interrupt(at, within=HERE) as found:
            locked()
        assert not lock.locked(), found.where


def test_a_handler_that_returns_lets_the_code_go_on() -> None:
    seen: list[str] = []
    with chaos.interrupt(2, lambda: seen.append("handler"), within=HERE) as points:
        assert work() == ["call", "call"]
    assert seen == ["handler"] and points.passed == 3 and points.where is not None


def test_it_is_over_with_its_block_and_what_is_not_within_does_not_count() -> None:
    with chaos.interrupt(0, within=("/elsewhere/",)) as points:
        work()
    assert points.passed == 0
    work()
