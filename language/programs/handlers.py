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

    def __init__(
        self, block: HandlersLater, number: int, handler: Callable[[int, FrameType | None], Any], waiting: int
    ) -> None:
        self.block = block
        self.number = number
        self.handler = handler
        self.waiting = waiting
        self.came: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Python runs handlers also where a function is entered: in `leave` before its first line.
        leaving = frame is not None and frame.f_code is HandlersLater.leave.__code__
        if self.block.all_wait or leaving or len(self.came) < self.waiting:
            self.came.append(frame)
        else:
            self.handler(number, frame)

    def run(self, waiting: int) -> None:
        """Run the handler for all that came but so many, also where it raises."""
        if len(self.came) > waiting:
            try:
                self.handler(self.number, self.came.pop(waiting))
            finally:
                self.run(waiting)

    def finish(self) -> None:
        now: Any = signal.getsignal(self.number)
        if now is self:  # the user may have set another meanwhile
            signal.signal(self.number, self.handler)
        self.run(0)


class HandlersLater:
    """Has the handlers of signals that come meanwhile run behind the block, in the main thread, where Python runs
    them. Ctrl-C interrupts at once, unless the user has another handler for it, which waits once, or so many are to
    wait (`ctrl_c`). It stands in for a handler of Ctrl-C in any case, so that none interrupts the block's own way in
    and out: handlers that were not put back would wait for ever."""

    def __init__(self, ctrl_c: int = 0) -> None:
        self._ctrl_c = ctrl_c
        self._changed: list[_Later] = []
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
                self._changed.append(_Later(self, number, handler, waiting))
                signal.signal(number, self._changed[-1])
            self.all_wait = False
            for later in self._changed:
                later.run(later.waiting)
        except BaseException:
            self.leave()
            raise
        return self

    def leave(self, *_: object) -> None:
        """Have them run from here on, and those that have waited now."""
        self.all_wait = True
        with ExitStack() as finishing:  # all of them, also where one raises: Ctrl-C, which may, comes last
            for later in self._changed:
                finishing.callback(later.finish)

    __exit__ = leave
