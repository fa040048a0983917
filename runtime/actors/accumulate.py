"""Accumulator: the replies of many actors folded into one value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from monarch.runtime.actors.adverbs import Endpoint
from monarch.runtime.future import Future

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Accumulator(Generic[P, R, A]):
    """Call an endpoint on all actors, and fold the replies, in the order in which they come.

        total = Accumulator(counters.value, 0, operator.add).accumulate().get()

    `combine(so_far, reply)` gives the next value; the first is `identity`.
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Send now. The future's value is folded in the thread that looks at it first, and fails with the first error
        of a reply or of `combine`."""
        return fold(list(self._endpoint.stream(*args, **kwargs)), self._identity, self._combine)


def fold(replies: list[Future[R]], identity: A, combine: Callable[[A, R], A]) -> Future[A]:
    """A future of all replies folded into one value, in the order of the list."""
    folded: Future[A] = Future.pending()
    if not replies:
        folded.resolve(lambda: identity)
        return folded
    left = len(replies)
    lock = threading.Lock()

    def result() -> A:
        value = identity
        for reply in replies:
            value = combine(value, reply.get())
        return value

    def one_more() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            folded.resolve(result)

    for reply in replies:
        reply.when_done(one_more)
    return folded
