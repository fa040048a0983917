"""Faults, injected on purpose, to test what a program does about them: `from monarch.testing import chaos`.

A fault is an ordinary call of the controller's. No setting, environment variable or message from elsewhere switches one
on, and where none was called for, nothing is slower (docs/guide/chaos.md).
"""

from __future__ import annotations

from monarch.runtime.chaos.interrupts import Points, ctrl_c, interrupt
from monarch.runtime.chaos.limits import limited
from monarch.runtime.chaos.links import Link
from monarch.runtime.chaos.workers import cut, delay, fail, flip, garble, kill, limit, nan, slow, stop

__all__ = [
    "Link",
    "Points",
    "ctrl_c",
    "cut",
    "delay",
    "fail",
    "flip",
    "garble",
    "interrupt",
    "kill",
    "limit",
    "limited",
    "nan",
    "slow",
    "stop",
]
