"""Which executors run, so that all of them can be traced: those that there are, and those that start meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from monarch.compiler.execution.executor import Executor

_running: weakref.WeakSet[Executor] = weakref.WeakSet()
_watchers: list[Callable[[Executor], None]] = []


def started(executor: Executor) -> None:
    """An executor says that its workers have been started."""
    _running.add(executor)
    for watcher in list(_watchers):
        watcher(executor)


def ended(executor: Executor) -> None:
    """An executor says that it is closed, or has lost a worker: it runs nothing any more."""
    _running.discard(executor)


def watch(watcher: Callable[[Executor], None]) -> None:
    """Call `watcher` with every executor that runs, and with each that starts until `unwatch`."""
    _watchers.append(watcher)
    try:
        for executor in list(_running):
            watcher(executor)
    except BaseException:
        _watchers.remove(watcher)
        raise


def unwatch(watcher: Callable[[Executor], None]) -> None:
    _watchers.remove(watcher)


def is_watched() -> bool:
    """Whether steps are being traced: what is compiled now should say what it knows of its values."""
    return bool(_watchers)
