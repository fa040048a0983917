"""`monarch.actor.span` and `traced`: blocks and functions of the user's as rows of the table `spans`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar, Token
from itertools import count
from time import monotonic_ns
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from monarch.compiler.execution.events import Timed, heard, tell
from monarch.runtime.actors.processes.current import running

P = ParamSpec("P")
R = TypeVar("R")

_numbers = count(1)
_around: ContextVar[int] = ContextVar("monarch span", default=0)


def actor() -> str:
    """The name of the actor that this code runs in; "" in none."""
    found = running.get(None)
    return found.actor_instance.label if found is not None and found.actor_instance.actor_id else ""


class Span:
    """A block whose time is recorded while `monarch.telemetry` is on: `with span("load"): …`. Made by `span`."""

    __slots__ = ("_name", "_number", "_start", "_token")

    def __init__(self, name: str) -> None:
        self._name = name
        self._token: Token[int] | None = None

    def __enter__(self) -> Span:
        if heard(Timed):
            self._number = next(_numbers)
            self._token = _around.set(self._number)
            self._start = monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            end = monotonic_ns()
            _around.reset(self._token)
            self._token = None
            tell(Timed(self._name, actor(), self._start, end, self._number, _around.get()))


def span(name: str) -> Span:
    """Record when a block runs, for how long, and inside which other one: `with span("load"): …`.

    The row is in the table `spans` of `monarch.telemetry`; where that is off, the block costs a function call. Outside
    of programs: in one, a block is only traced.
    """
    return Span(name)


@overload
def traced(fn: Callable[P, R]) -> Callable[P, R]: ...


@overload
def traced(*, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def traced(fn: Callable[P, R] | None = None, *, name: str | None = None) -> Any:
    """Record each call of a function as a `span`, named after it or by `name`: `@traced`, `@traced(name="load")`. Of an
    `async def` function until it returns."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        label = fn.__name__ if name is None else name
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with Span(label):
                    return await fn(*args, **kwargs)

            return call_async

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Span(label):
                return fn(*args, **kwargs)

        return call

    return decorate if fn is None else decorate(fn)
