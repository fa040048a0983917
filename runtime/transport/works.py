"""Works under way, as the threads that wait for them see them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

from monarch.runtime.transport.interface import Check

_SLICE = 0.05

# Held for some assignments only, so one for all works is enough.
_ending = threading.Lock()


class Pending:
    """A `Work` that another thread finishes, once. It refers to `keep` until then: memory that must stay where it
    is."""

    __slots__ = ("_calls", "_ended", "_error", "_lock", "_value", "keep")

    def __init__(self, keep: Any = None) -> None:
        self.keep = keep
        self._ended = False
        self._value: int | None = None
        self._error: BaseException | None = None
        self._calls: list[Callable[[], None]] = []
        # Locked until the end, then passed from waiter to waiter: a tenth of what a threading.Event costs.
        self._lock = threading.Lock()
        self._lock.acquire()

    def finish(self, value: int | None = None) -> None:
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, value: int | None, error: BaseException | None) -> None:
        with _ending:
            if self._ended:
                return
            self._value, self._error, self.keep = value, error, None
            self._ended = True
            calls, self._calls = self._calls, []
        self._lock.release()
        for call in calls:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Call the function at the end, on the thread that finishes the work; at once if it is finished."""
        with _ending:
            if not self._ended:
                self._calls.append(call)
                return
        call()

    def done(self) -> bool:
        return self._ended

    def wait(self, timeout: float | None = None, check: Check | None = None) -> int | None:
        if not self._ended:
            self._sleep(timeout, check)
        if self._error is not None:
            # Each waiter raises an error of its own: a traceback grows with each place that it is raised at.
            raise copy.copy(self._error)
        return self._value

    def _sleep(self, timeout: float | None, check: Check | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = -1.0 if end is None else max(0.0, end - time.monotonic())
            if check is not None:
                check()
                left = min(left, _SLICE) if left >= 0 else _SLICE
            if self._lock.acquire(timeout=left):
                self._lock.release()
                return
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"not finished within {timeout:g} s")


class LinkWork(Pending):
    """A work that ends with its link, which knows it by a number until then."""

    __slots__ = ("number", "works")

    def __init__(self, number: int, works: dict[int, LinkWork], keep: Any) -> None:
        super().__init__(keep)
        self.number = number
        self.works = works

    def finish(self, value: int | None = None) -> None:
        self.works.pop(self.number, None)
        super().finish(value)

    def fail(self, error: BaseException) -> None:
        self.works.pop(self.number, None)
        super().fail(error)


class Finished:
    """A `Work` that was finished when it was made."""

    __slots__ = ()

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None, check: Check | None = None) -> None:
        return None

    def then(self, call: Callable[[], None]) -> None:
        call()


FINISHED = Finished()
