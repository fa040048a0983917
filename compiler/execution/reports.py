"""Whether traces are being read: plans that are compiled meanwhile have reports about their values."""

from __future__ import annotations

import os
import weakref

_readers: weakref.WeakSet[object] = weakref.WeakSet()


def want_reports(reader: object) -> None:
    """Have plans compiled with their reports, as long as `reader` lives and has not called `want_no_reports`."""
    _readers.add(reader)


def want_no_reports(reader: object) -> None:
    _readers.discard(reader)


def reports_are_wanted() -> bool:
    return bool(_readers)


if hasattr(os, "register_at_fork"):  # a forked process has no part in its parent's profiles
    os.register_at_fork(after_in_child=_readers.clear)
