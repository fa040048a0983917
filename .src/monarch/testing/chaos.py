"""Faults, injected on purpose, to test what a program does about them: `from monarch.testing import chaos`.

A fault is an ordinary call of the controller's. No setting, environment variable or message from elsewhere switches one
on, and where none was called for, nothing is slower (docs/chaos.md).
"""

from __future__ import annotations

from monarch.runtime.chaos.interrupts import Points, ctrl_c, interrupt

__all__ = ["Points", "ctrl_c", "interrupt"]
