"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def stop(*pids: int) -> None:
    """Stop processes, and wait until all their threads have been: until then each may go on for a moment."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        until(_is_stopped, pid)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes stand still meanwhile."""
    stop(*pids)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it was killed meanwhile
                os.kill(pid, signal.SIGCONT)


def until(reached: Callable[..., bool], *arguments: Any) -> None:
    """Wait for what comes soon."""
    deadline = time.monotonic() + 60
    while not reached(*arguments):
        assert time.monotonic() < deadline
        os.sched_yield()


def _is_stopped(pid: int) -> bool:
    states = {each.read_text().rpartition(") ")[2][0] for each in Path(f"/proc/{pid}/task").glob("*/stat")}
    return states == {"T"}
