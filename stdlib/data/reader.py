"""Batches that a thread makes ahead of their reader, a bounded number of them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from monarch.compiler.config import settings

T = TypeVar("T")
logger = logging.getLogger("monarch.data")

_PATIENCE = 10.0  # seconds in which a source gives a part before `close` says that it still reads
_LAST_PATIENCE = 0.5  # and in which it may close what it has open at the end of the program


class Reader(Generic[T]):
    """A thread that takes values of an iterator, at most `ahead` more than were asked for.

    `first` raises the iterator's error, at its place, and StopIteration at the end.
    """

    def __init__(self, values: Iterator[T], ahead: int, doing: Callable[[], str]) -> None:
        self._values, self._ahead, self._doing = values, ahead, doing
        self.ready: deque[T] = deque()
        self.changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self.waited = 0.0
        """Seconds for which values were waited for."""
        self._thread = threading.Thread(target=self._run, name="monarch data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._has_room():
                value = next(self._values, _END)
                if value is _END:
                    break
                with self.changed:
                    self.ready.append(value)  # type: ignore[arg-type]
                    self.changed.notify_all()
                del value
        except BaseException as error:  # raised where the next value is asked for
            self._error = error
        finally:
            close = getattr(self._values, "close", None)
            if close is not None:
                close()  # here: generators run in the thread that reads them
            with self.changed:
                self._ended = True
                self.changed.notify_all()

    def _has_room(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self._closed or len(self.ready) < self._ahead)
            return not self._closed

    def first(self) -> T:
        """The next value, which stays the next one until it is dropped: an interrupted call loses none. Waits for it.
        Raises the iterator's error at its place, and StopIteration at the end."""
        if not self.ready:
            self._wait()
        if self.ready:
            return self.ready[0]
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def drop(self, value: T) -> None:
        """The caller has the value, and it is not the next one any more. To drop it again changes nothing."""
        with self.changed:
            if self.ready and self.ready[0] is value:
                self.ready.popleft()
                self.changed.notify_all()

    def _wait(self) -> None:
        """Wait for a value or the end, and report the stalled source after `settings.stall_warning`, and each time it
        doubles."""
        start, said = time.monotonic(), settings.stall_warning
        while True:
            waited = time.monotonic() - start
            with self.changed:
                if self.changed.wait_for(lambda: self.ready or self._ended, max(0.0, said - waited)):
                    self.waited += time.monotonic() - start
                    return
            logger.warning("no batch for %.3g s: %s, %s", time.monotonic() - start, self._doing(), self._where())
            said *= 2

    def _where(self) -> str:
        """The line at which the thread stands."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "its thread has ended" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"

    def close(self) -> None:
        """End the thread, once the source has given the part that it is reading. Idempotent."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self.ready.clear()
        if self._thread is threading.current_thread():  # a garbage collector's call
            return
        ends = not threading.main_thread().is_alive()  # the program: its thread ends with it, whatever the source does
        self._thread.join(_LAST_PATIENCE if ends else _PATIENCE)
        if self._thread.is_alive() and not ends:
            logger.warning("a stream is closed, and its source still reads: %s, %s", self._doing(), self._where())


_END = object()
