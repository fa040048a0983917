"""The I/O thread of an endpoint: callbacks for descriptors that are ready, calls from other threads, and timers."""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from monarch.compiler.plan import MonarchError

_log = logging.getLogger("monarch.transport")

Value = TypeVar("Value")

LOOK_SECONDS = 1.0
"""How often a thread that waits for the I/O thread checks that this one lives."""


class Timer:
    """A call to come; `cancel` may be called from any thread, also afterwards."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Starts its thread when it is first given something to do. Every method may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._watched: dict[int, Callable[[int], None]] = {}
        self._failed: dict[int, Callable[[Exception], None]] = {}
        self._calls: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- what others ask for ---------------------------------------------------------------------------------------

    def watch(
        self,
        fd: int,
        events: int,
        call: Callable[[int], None],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Call `call(events)` whenever the descriptor is ready (level-triggered), until `unwatch`. If that raises, the
        descriptor is unwatched, and `failed` is called with the error, so that works which waited for it end."""
        self._watched[fd] = call
        if failed is not None:
            self._failed[fd] = failed
        self._epoll.register(fd, events)
        self._start()

    def change(self, fd: int, events: int) -> None:
        """Watch for other events from now on."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        self._failed.pop(fd, None)
        if self._watched.pop(fd, None) is not None and not self._closed:
            self._epoll.unregister(fd)

    def call(self, function: Callable[[], object], failed: Callable[[Exception], None] | None = None) -> None:
        """Call the function soon; `failed` with its error, as in `watch`."""
        self._calls.append(function if failed is None else functools.partial(self._attempt, function, failed))
        self._start()
        self._ring()

    def run(self, function: Callable[[], Value]) -> Value:
        """Call the function on the I/O thread (at once, where this is that thread), and return its result or raise its
        error. Once the loop is closed: at once too, for nothing runs beside it then. Raises MonarchError where the
        thread has ended without it, which only a defect can do."""
        if self.here():
            return function()
        done = threading.Event()
        values: list[Value] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                values.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        with self._starting:
            closed = self._closed
            if not closed:
                self._calls.append(run)
        if closed:
            return function()
        self._start()
        self._ring()
        # The thread takes calls in turn, and no callback waits for long: this ends as long as there is the thread.
        while not done.wait(LOOK_SECONDS):
            if self._has_died() and not done.is_set():
                raise MonarchError(f"the thread {self._name} has ended", hint="its traceback is on standard error.")
        if errors:
            raise errors[0]
        return values[0]

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        when = time.monotonic() + seconds
        self.call(lambda: heapq.heappush(self._timers, (when, next(self._order), timer)))
        return timer

    def _has_died(self) -> bool:
        thread = self._thread
        return thread is not None and not thread.is_alive()

    def here(self) -> bool:
        """Whether this is the I/O thread."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """End the thread, after the calls that were asked for before."""
        with self._starting:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._ring()
            thread.join()  # it looks at `_closed` before it sleeps again, and no callback waits for long
        elif thread is None:
            self._end()

    def forget(self) -> None:
        """In the child of a fork, where there is no such thread: close the descriptors."""
        self._closed = True
        self._epoll.close()
        os.close(self._bell)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._closed:
                    raise MonarchError("the endpoint is closed")
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()

    def _ring(self) -> None:
        if not self.here():
            try:
                os.eventfd_write(self._bell, 1)
            except OSError:
                pass  # closed meanwhile, or rung more than often enough

    def _serve(self) -> None:
        poll, watched, bell = self._epoll.poll, self._watched, self._bell
        while not self._closed:
            wait = -1.0  # until the bell rings, a descriptor is ready, or a timer is due
            if self._timers:
                wait = max(0.0, self._timers[0][0] - time.monotonic())
            if self._calls:
                wait = 0
            for fd, events in poll(wait):
                if fd == bell:
                    os.eventfd_read(bell)
                    continue
                call = watched.get(fd)
                if call is not None:
                    try:
                        call(events)
                    except Exception as error:
                        # A defect, of whatever kind: this thread serves all links, and goes on for the others. The one
                        # that it belongs to ends, and its log has the traceback.
                        _log.exception("a callback of %s failed; its descriptor is no longer watched", self._name)
                        failed = self._failed.get(fd)
                        self.unwatch(fd)
                        if failed is not None:
                            self._guarded(functools.partial(failed, error))
            self._calls_and_timers()
        self._calls_and_timers()
        self._end()

    def _calls_and_timers(self) -> None:
        for _ in range(len(self._calls)):
            self._guarded(self._calls.popleft())
        while self._timers and self._timers[0][0] <= time.monotonic():
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                self._guarded(call)

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            # A defect, of whatever kind, and no thread waits for the call: those that wait use `run`, which raises it
            # for them. The I/O thread goes on, for all others.
            _log.exception("a call on %s failed", self._name)

    def _attempt(self, call: Callable[[], object], failed: Callable[[Exception], None]) -> None:
        try:
            call()
        except Exception as error:
            _log.exception("a call on %s failed", self._name)
            failed(error)

    def _end(self) -> None:
        # Calls that came while the thread ended must still run: another thread may wait for them.
        while self._calls:
            self._guarded(self._calls.popleft())
        self._epoll.close()
        os.close(self._bell)
