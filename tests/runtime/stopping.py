"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def stop(*pids: int) -> None:
    """Stop processes, and wait until all their threads have been: until then each may go on for a moment."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        until(_is_stopped, pid)


def until(reached: Callable[..., bool], *arguments: Any) -> None:
    """Wait for what comes soon."""
    deadline = time.monotonic() + 60
    while not reached(*arguments):
        assert time.monotonic() < deadline
        os.sched_yield()


def _is_stopped(pid: int) -> bool:
    states = {each.read_text().rpartition(") ")[2][0] for each in Path(f"/proc/{pid}/task").glob("*/stat")}
    return states == {"T"}
