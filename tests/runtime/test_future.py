"""Futures: looked at by threads and by event loops, as often as one likes."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from monarch.runtime.actors.accumulate import fold
from monarch.runtime.future import Future


def test_users_get_futures_from_calls() -> None:
    with pytest.raises(TypeError, match="a Future is the result of a call"):
        Future()


def resolved(value: int) -> Future[int]:
    future: Future[int] = Future.pending()
    future.resolve(lambda: value)
    return future


def failed(error: Exception) -> Future[int]:
    future: Future[int] = Future.pending()
    future.fail(error)
    return future


def test_it_can_be_looked_at_again_and_again() -> None:
    future = resolved(3)
    assert (future.get(), future.result(), future.get(timeout=0), future.exception(), future.done()) == (
        3,
        3,
        3,
        None,
        True,
    )

    async def look() -> list[int]:
        return [await future, await future.as_asyncio(), await future, future.get()]

    assert asyncio.run(look()) == [3, 3, 3, 3]
    assert asyncio.run(look()) == [3, 3, 3, 3]  # another loop


def test_an_error_too() -> None:
    error = KeyError("x")
    future = failed(error)
    for _ in range(3):
        with pytest.raises(KeyError) as caught:
            future.get()
        assert caught.value is error
    assert future.exception() is error

    async def look() -> None:
        await future

    with pytest.raises(KeyError):
        asyncio.run(look())


def test_raising_it_often_does_not_pile_up_tracebacks() -> None:
    future = failed(KeyError("x"))
    lengths = set()
    for _ in range(5):
        with pytest.raises(KeyError) as caught:
            future.get()
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1


def test_a_timeout_neither_consumes_nor_cancels() -> None:
    future: Future[int] = Future.pending()
    for _ in range(3):
        with pytest.raises(TimeoutError, match="it may still come"):
            future.get(timeout=0.001)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    assert not future._callbacks  # nothing is left of those who gave up
    future.resolve(lambda: 7)
    assert future.get(timeout=0) == 7


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, math.inf, "1", True])
def test_a_bad_timeout_is_an_error_even_when_the_value_is_there(timeout: Any) -> None:
    for future in (resolved(1), Future[int].pending()):
        for look in (future.get, future.result, future.exception):
            with pytest.raises(ValueError, match="timeout"):
                look(timeout=timeout)


def test_threads_and_loops_wait_for_the_same_value() -> None:
    future: Future[int] = Future.pending()
    found: list[int] = []

    async def wait() -> None:
        found.append(await future)

    threads = [threading.Thread(target=lambda: found.append(future.get())) for _ in range(4)]
    threads += [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    future.resolve(lambda: 5)
    for thread in threads:
        thread.join()
    assert found == [5] * 8


def test_it_is_decoded_once_by_who_looks_first() -> None:
    decoded: list[str] = []
    future: Future[int] = Future.pending()
    future.resolve(lambda: decoded.append(threading.current_thread().name) or 1)  # type: ignore[func-returns-value]
    assert decoded == []
    thread = threading.Thread(target=future.get, name="first")
    thread.start()
    thread.join()
    future.get()
    assert decoded == ["first"]


def test_only_the_first_answer_counts() -> None:
    future = resolved(1)
    future.resolve(lambda: 2)
    future.fail(KeyError())
    assert future.get() == 1


def test_cancelling_an_asyncio_future_cancels_nothing_else() -> None:
    future: Future[int] = Future.pending()

    async def give_up() -> None:
        theirs = future.as_asyncio()
        theirs.cancel()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0)
        future.resolve(lambda: 4)
        assert await future == 4

    asyncio.run(give_up())
    assert future.get() == 4


def test_a_loop_that_is_closed_before_the_answer() -> None:
    future: Future[int] = Future.pending()

    async def ask() -> None:
        future.as_asyncio()

    asyncio.run(ask())
    future.resolve(lambda: 4)
    assert future.get() == 4


def test_stop_iteration_does_not_end_who_awaits_it() -> None:
    async def look() -> None:
        await failed(StopIteration("x")).as_asyncio()

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(look())


def test_as_asyncio_needs_a_loop() -> None:
    with pytest.raises(RuntimeError):
        resolved(1).as_asyncio()


def test_replies_are_folded_once_all_are_there() -> None:
    first: Future[int] = Future.pending()
    total = fold([first, resolved(2), resolved(3)], 10, lambda so_far, reply: so_far * reply)
    assert not total.done()
    first.resolve(lambda: 1)
    assert total.get() == 60
    assert fold([], "nothing", lambda so_far, reply: so_far).get() == "nothing"


def test_an_error_of_a_reply_or_of_combine_is_the_folds() -> None:
    with pytest.raises(KeyError):
        fold([resolved(1), failed(KeyError("x"))], 0, lambda so_far, reply: so_far + reply).get()
    with pytest.raises(ZeroDivisionError):
        fold([resolved(0)], 1, lambda so_far, reply: so_far // reply).get()
