"""The sending half of a link: whole frames of other threads, and those of the I/O thread.

A thread that sends holds one lock. The I/O thread never waits for it, nor for the socket: its frames go to an outbox.
It sends from there if it gets the lock at once; else the lock's owner does before it releases it.
"""

from __future__ import annotations

import functools
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from monarch.runtime.transport.frames import SIZE, Answer, Outgoing, advance
from monarch.runtime.transport.loop import Loop
from monarch.runtime.transport.plug import Owned
from monarch.runtime.transport.streams import Stream

_JOINED = 32  # frames in one call
_SLICE_MS = 1000


class Sending(Protocol):
    """The part of a link that its outbox needs."""

    def can_send(self) -> None:
        """Raises LinkLost where the link has ended, or is being closed."""

    def send_failed(self, error: OSError) -> None:
        """Called without the lock, on the I/O thread."""

    def interrupted(self) -> None:
        """A frame stays half out."""

    @property
    def alive(self) -> bool: ...


class Outbox:
    def __init__(self, stream: Stream, loop: Loop, link: Sending) -> None:
        self._stream = stream
        self._loop = loop
        self._link = link
        self._fd = stream.fileno()
        self._send_now = stream.send
        self._lock = threading.Lock()
        self._waiting: deque[Outgoing] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, header: bytes, payload: memoryview) -> OSError | None:
        """Send a frame, and wait until the system has taken all of it. Gives the error with which that failed: to be
        dealt with without the lock, which the I/O thread takes when it buries the link."""
        with self._lock:
            self._link.can_send()
            try:
                if self._waiting:
                    # A frame there that is half out has to be finished before the next.
                    while not self._push():
                        self._wait_writable()
                try:
                    sent = self._send_now((header, payload))
                except BlockingIOError:
                    sent = 0
                if sent != SIZE + payload.nbytes:
                    self._send_rest([memoryview(header), payload], sent)
            except OSError as error:
                return error
            except BaseException:
                # Whatever interrupted it: a frame that stays unfinished cannot be followed by another.
                self._link.interrupted()
                raise
        if self._waiting:
            self.flush()
        return None

    def _send_rest(self, buffers: list[memoryview], sent: int) -> None:
        advance(buffers, sent)
        while buffers:
            try:
                advance(buffers, self._send_now(buffers))
            except BlockingIOError:
                self._wait_writable()

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while not poll.poll(_SLICE_MS):
            self._link.can_send()

    def add(self, outgoing: Outgoing) -> None:
        """Send a frame as soon as the socket takes it. Never waits."""
        self._waiting.append(outgoing)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes, unless another thread is sending: that one goes on with it before it
        releases the lock."""
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                done = self._push()
            except OSError as error:
                # Not at once: the caller may be in the middle of a read.
                self._loop.call(functools.partial(self._link.send_failed, error))
                self._clear()
                return
            finally:
                self._lock.release()
            if not done:
                self._arm()
                return

    def _push(self) -> bool:
        """Send what waits, with the lock held; gives False where the socket takes no more."""
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            buffers = first.buffers
            if isinstance(first, Answer):
                first.look()
                buffers = first.buffers
            elif not first.files:
                # Not by iterating: others append meanwhile.
                for at in range(1, min(_JOINED, len(waiting))):
                    if isinstance(waiting[at], Answer) or waiting[at].files:
                        break
                    buffers = buffers + waiting[at].buffers
            try:
                if first.files:
                    sent = self._stream.send_files(buffers, first.files)
                    _close_files(first)
                else:
                    sent = self._send_now(buffers)
            except BlockingIOError:
                return False
            while waiting:
                sent = advance(waiting[0].buffers, sent)
                if waiting[0].buffers:
                    break
                waiting.popleft()
                if not sent:
                    break
        return True

    def _arm(self) -> None:
        """Have the loop say when the socket takes more. On the I/O thread, where the socket is closed, too."""
        if not self._loop.here():
            self._loop.call(self._arm)
        elif self._link.alive:
            self._loop.change(self._fd, select.EPOLLIN | select.EPOLLOUT)

    def writable(self) -> None:
        """The socket takes more; on the I/O thread."""
        self._loop.change(self._fd, select.EPOLLIN)
        self.flush()

    def await_unread(self, owned: Owned) -> None:
        """Return once nothing is read any more from memory that was dropped."""
        if any(isinstance(each, Answer) and each.owned is owned for each in self._waiting.copy()):
            with self._lock:
                pass

    def close(self, close: Callable[[], None]) -> None:
        """Close the stream while nobody sends."""
        with self._lock:
            close()
            self._clear()

    def _clear(self) -> None:
        while self._waiting:
            _close_files(self._waiting.popleft())


def _close_files(outgoing: Outgoing) -> None:
    for file in outgoing.files:
        os.close(file)
    outgoing.files = ()
