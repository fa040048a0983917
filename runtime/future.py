"""A value that will be there: waited for by a thread, or awaited by asyncio; looked at as often as one likes."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
_UNREAD: Any = object()


class Future(Generic[T]):
    """A reply that is on its way.

        loss = trainer.step.call_one(batch)     # returns at once
        loss.get(timeout=5)                     # in a thread; `result` is the same
        await loss                              # in asyncio

    A timeout neither consumes nor cancels: look again later. Any number of threads and event loops may look.
    TypeError where one is made: calls give futures.
    """

    __slots__ = ("_callbacks", "_decode", "_done", "_error", "_lock", "_value")

    def __init__(self) -> None:
        raise TypeError("a Future is the result of a call: actors.step.call(...). To answer later, use Channel.open()")

    @classmethod
    def pending(cls) -> Self:
        """One without an answer, for a caller that resolves it later."""
        future = object.__new__(cls)
        future._begin()
        return future

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._value: T = _UNREAD
        self._error: Exception | None = None
        self._decode: Callable[[], T] | None = None
        self._callbacks: list[Callable[[], object]] = []

    # -- resolving: once ----------------------------------------------------------------------------------------------

    def resolve(self, decode: Callable[[], T]) -> None:
        """Set the answer: `decode` gives it, or raises it. Only the first answer counts.

        It runs once, in the thread that first looks, so that the thread that receives messages need not decode them.
        """
        with self._lock:
            if self._done:
                return
            self._decode = decode
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def fail(self, error: Exception) -> None:
        """The answer is an error."""

        def decode() -> T:
            raise error

        self.resolve(decode)

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it once the future has an answer, in whatever thread that happens, or now; it may not block or raise."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    # -- looking -------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether there is a value or an error, so that `get` does not wait."""
        return self._done

    def get(self, timeout: float | None = None) -> T:
        """Wait for the value, at most `timeout` seconds: TimeoutError then. Raises the answer's error.

        A timeout that is no finite number from 0 is a ValueError.
        """
        self._wait(timeout)
        return self._read()

    def result(self, timeout: float | None = None) -> T:
        """The same as `get`, `timeout` in seconds too."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """The error that `get` would raise, or None. Waits for it, at most `timeout` seconds: TimeoutError then."""
        try:
            self.get(timeout)
        except Exception as error:
            if error is not self._error:  # but a timeout, say
                raise
        return self._error

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None:
            number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
            if not number or not math.isfinite(timeout) or timeout < 0:
                raise ValueError(f"a timeout is a finite number of seconds from 0, or None, not {timeout!r}")
        if self._done:
            return
        awake = threading.Lock()
        awake.acquire()
        self.when_done(awake.release)
        if not awake.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            with self._lock:
                if not self._done:  # or else the callbacks are gone, and the answer just came
                    self._callbacks.remove(awake.release)
                    raise TimeoutError(f"no answer within {timeout} s; it may still come: look again later")

    def _read(self) -> T:
        if self._decode is not None:
            with self._lock:
                decode = self._decode
                if decode is not None:
                    try:
                        self._value = decode()
                    except Exception as error:
                        self._error = error
                    self._decode = None  # but not after Ctrl-C, which is no answer
        if self._error is not None:
            # Raised as often as looked at: without the frames of former looks.
            raise self._error.with_traceback(None)
        return self._value

    def as_asyncio(self) -> asyncio.Future[T]:
        """An `asyncio.Future` of the running loop with the same answer; to cancel it cancels nothing else."""
        loop = asyncio.get_running_loop()
        theirs: asyncio.Future[T] = loop.create_future()

        def finish() -> None:
            if theirs.done():  # cancelled
                return
            try:
                theirs.set_result(self._read())
            except StopIteration as error:  # which asyncio refuses, for it would end the coroutine that awaits
                theirs.set_exception(RuntimeError(f"the answer is the error {error!r}"))
            except Exception as error:
                theirs.set_exception(error)

        def callback() -> None:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                if not loop.is_closed():  # or else nobody is left to be told
                    raise

        def forget(_: object) -> None:  # which also keeps this future, as long as somebody awaits the other
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        if self._done:
            finish()
        else:
            self.when_done(callback)
            theirs.add_done_callback(forget)
        return theirs

    def __await__(self) -> Generator[Any, None, T]:
        if self._done:
            return self._read()
        return (yield from self.as_asyncio().__await__())
