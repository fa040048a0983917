"""Signals' handlers while a program is traced: Python holds then what the step has only in part, and tensors that have
no values yet. A handler that looks at it, calls a program or saves a checkpoint runs behind the step instead."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

_SIGNALS = sorted(signal.valid_signals(), key=lambda number: number != signal.SIGINT)
_main = threading.main_thread()
ALL = sys.maxsize


class _Later:
    """Stands for a handler while a block runs: notes its signals, of which so many wait."""

    def __init__(self, block: HandlersLater, handler: Callable[[int, FrameType | None], Any], waiting: int) -> None:
        self.block = block
        self.handler = handler
        self.waiting = waiting
        self.came: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        leaving = frame is not None and frame.f_code in _LEAVING
        if self.block.all_wait or leaving or len(self.came) < self.waiting:
            self.came.append((number, frame))
        else:
            self.handler(number, frame)

    def run(self) -> None:
        """Have the handler run for each signal that waits."""
        if self.came:
            try:
                self.handler(*self.came.pop(0))
            finally:
                self.run()


class HandlersLater:
    """Has the handlers of signals that come meanwhile run behind the block, in the main thread, where Python runs
    them. Ctrl-C interrupts at once, unless the user has another handler for it, which waits once, or so many are to
    wait (`ctrl_c`). Nothing is left half done on the way in and out."""

    def __init__(self, ctrl_c: int = 0) -> None:
        self._ctrl_c = ctrl_c
        self._changed: list[tuple[int, _Later]] = []
        self.all_wait = True

    def __enter__(self) -> HandlersLater:
        if threading.current_thread() is not _main:
            return self
        try:
            for number in _SIGNALS:  # Ctrl-C comes first, which could end this
                handler = signal.getsignal(number)
                if not callable(handler) or (isinstance(handler, _Later) and number != signal.SIGINT):
                    continue
                waiting = ALL
                if number == signal.SIGINT:
                    own = handler is not signal.default_int_handler and not isinstance(handler, _Later)
                    waiting = max(self._ctrl_c, own)
                later = _Later(self, handler, waiting)
                self._changed.append((number, later))
                signal.signal(number, later)
            self.all_wait = False
            for later in [later for _, later in self._changed if len(later.came) > later.waiting]:
                later.handler(*later.came.pop(0))
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Have them run from here on, and those that have waited now."""
        self.all_wait = True
        with ExitStack() as waiting:  # all of them run, also where one raises, or Ctrl-C comes as it is there again
            for _, later in self._changed:
                waiting.callback(later.run)
            for number, later in reversed(self._changed):
                now: Any = signal.getsignal(number)
                if now is later:
                    signal.signal(number, later.handler)


_LEAVING = HandlersLater.__exit__.__code__, HandlersLater.leave.__code__
"""As they are entered, the block waits for nothing yet."""
