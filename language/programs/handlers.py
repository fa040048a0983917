"""Signals' handlers while a program is traced: Python holds then what the step has only in part, and tensors that have
no values yet. A handler that looks at it, calls a program or saves a checkpoint runs behind the step instead."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_SIGNALS = sorted(signal.valid_signals())
_main = threading.main_thread()


class _Later:
    """Stands for a handler: notes its signals while they are to wait."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.waits = True
        self.came: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.waits or (self.came and number == signal.SIGINT):  # the second Ctrl-C does not wait
            self.handler(number, frame)
        else:
            self.came.append((number, frame))


@contextmanager
def handlers_later(ctrl_c: bool = False) -> Iterator[None]:
    """Have the handlers of signals that come meanwhile run behind the block, in the main thread, where Python runs
    them. Ctrl-C interrupts at once, unless the user has another handler for it or, with `ctrl_c`, it is to wait too:
    once."""
    if threading.current_thread() is not _main:
        yield
        return
    changed: list[tuple[int, _Later]] = []
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            waits = ctrl_c or handler is not signal.default_int_handler
            if callable(handler) and waits and not isinstance(handler, _Later):
                changed.append((number, _Later(handler)))
                signal.signal(number, changed[-1][1])
        yield
    finally:
        for of, later in changed:
            later.waits = False
            if isinstance(signal.getsignal(of), _Later):
                signal.signal(of, later.handler)
        with ExitStack() as waiting:  # all of them run, also where one raises
            for _, later in changed[::-1]:
                for came in later.came[::-1]:
                    waiting.callback(later.handler, *came)
