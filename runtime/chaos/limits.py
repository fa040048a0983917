"""Limits on what the controller itself can have."""

from __future__ import annotations

import resource as system
from collections.abc import Iterator
from contextlib import contextmanager

from monarch.runtime.chaos.workers import Resource
from monarch.runtime.worker.faults import address_space, open_files


@contextmanager
def limited(resource: Resource, left: int) -> Iterator[None]:
    """In the block this process, the controller, has only so much left: see `limit`, which is for workers. Processes
    that are forked in the block have the same limit, also behind it."""
    number, used = {
        "memory": (system.RLIMIT_AS, address_space),
        "files": (system.RLIMIT_NOFILE, open_files),
        "file size": (system.RLIMIT_FSIZE, lambda: 0),
    }[resource]
    now, most = system.getrlimit(number)
    system.setrlimit(number, (used() + left, most))
    try:
        yield
    finally:
        system.setrlimit(number, (now, most))
