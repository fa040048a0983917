"""The thread that does a link's jobs on GPUs, in the order in which they come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

_AHEAD = 16
_MOST = 1024


class Job(Protocol):
    @property
    def alone(self) -> bool:
        """Whether all before it have ended when it begins, and none after it begins before its end."""

    def begin(self) -> None:
        """Launch the job's copies; may block."""

    def end(self) -> None:
        """Wait for the copies, and finish the work that waits for them."""


class Lane:
    """Jobs begin in order, and end in order; some are launched ahead, so that a GPU need not wait for this thread,
    which starts with the first of them. `broken` is called with a job's error; no job should raise."""

    def __init__(self, name: str, broken: Callable[[BaseException], None]) -> None:
        self._name = name
        self._broken = broken
        self.jobs: deque[Job] = deque()
        self._begun: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._at_end: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """Takes no lock: a job has begun here before it waits no more."""
        return bool(self.jobs or self._begun)

    def add(self, job: Job, wait: bool = True) -> bool:
        """Gives whether it was taken: not once the lane is closed. Waits while there are very many, unless told not
        to."""
        with self._changed:
            while wait and len(self.jobs) >= _MOST and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self.jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def drain(self, seconds: float) -> None:
        """Wait until all jobs have ended; not on the lane's own thread, which they end on."""
        if self._thread is threading.current_thread():
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.busy, seconds)

    def close(self, at_end: Callable[[], None]) -> None:
        """Take no more jobs; the thread ends when those that there are have ended, with a call of the function."""
        with self._changed:
            self._closed = True
            self._at_end.append(at_end)
            idle = self._thread is None
            self._changed.notify_all()
        if idle:
            at_end()

    def join(self, seconds: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self.jobs and not self._begun:
                    if self._closed:
                        break
                    self._changed.wait()
                else:
                    job = self._next()
                    if job is not None:
                        self._begun.append(job)
                        self.jobs.popleft()
            if not self._begun:
                break
            if job is not None:
                self._guarded(job.begin)
                continue
            # A job is under way until its work is finished: a job that comes meanwhile runs after it.
            self._guarded(self._begun[0].end)
            with self._changed:
                self._begun.popleft()
                self._changed.notify_all()
        for call in self._at_end:
            self._guarded(call)

    def _next(self) -> Job | None:
        """The job that can begin now, if any."""
        if not self.jobs or len(self._begun) >= _AHEAD:
            return None
        first = self.jobs[0]
        if self._begun and (first.alone or self._begun[-1].alone):
            return None
        return first

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            # Whatever it is: this thread has to go on, for somebody waits for each of its jobs.
            self._broken(error)
