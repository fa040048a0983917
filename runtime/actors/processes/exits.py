"""Orderly ends of actors and processes: handlers of `atexit` and finalizers run in those that are stopped, as in any
other process."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from monarch.compiler.execution.ending import end, finish

_parents: object = None
"""The finalizers of the parent, which do nothing here."""


class End(Exception):
    """An actor is to end: it was stopped, or died of an error. `detail` has the error's traceback."""

    def __init__(self, reason: str, error: Exception | None = None, detail: str = "") -> None:
        self.reason = reason
        self.error = error
        self.detail = detail or reason


class Abandoned(BaseException):
    """Ends the calls of an actor that was stopped and did not stop."""


def forget_what_is_the_parents() -> None:
    """In a process that was just forked: the parent's exit handlers, and finalizers of its objects, such as those that
    delete temporary folders, are not for this process."""
    atexit._clear()
    finalize: Any = weakref.finalize
    global _parents
    # Kept: to free their content copies 500 pages that are shared with the parent, a fifth of all of the start.
    _parents, finalize._registry = finalize._registry, {}
    finalize._registered_with_atexit = False
    atexit.register(end)
    atexit.register(logging.shutdown)
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._finalizer_registry.clear()
        sys.modules["multiprocessing.process"].__dict__["_children"] = set()
        atexit.register(util._exit_function)  # ends the children that actors start


def run_exit_handlers() -> None:
    """Run the exit handlers of this process, the last first, when its saves have ended. A handler's error is printed,
    and the others run."""
    finish()
    atexit._run_exitfuncs()


def end_thread(ident: int, kind: type[BaseException]) -> None:
    """Have Python raise such an exception in a thread, at the next line of Python that it runs."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def interrupt_main(code: int, seconds: float) -> None:
    """Raise KeyboardInterrupt in the main thread, as Ctrl-C does, so that its `finally` and the handlers of `atexit`
    run; if it ends of that, the program does so with the exit status `code`. Returns where the main thread has not
    ended in time, or where the program does not take interrupts."""
    main, shown = threading.main_thread(), sys.excepthook
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL, None) or not main.is_alive():
        return

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind is not KeyboardInterrupt:
            shown(kind, error, trace)
        atexit._run_exitfuncs()
        exit_now(code)

    sys.excepthook = ended
    signal.pthread_kill(main.ident or 0, signal.SIGINT)
    main.join(seconds)


def exit_now(code: int) -> NoReturn:
    for file in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):
            file.flush()
    os._exit(code)
