"""Limits on the controller's own resources."""

from __future__ import annotations

import resource as system
from collections.abc import Iterator
from contextlib import contextmanager

from monarch.runtime.chaos.workers import Resource
from monarch.runtime.worker.faults import limit_on_file_size, limit_on_files, limit_on_memory


@contextmanager
def limited(resource: Resource, left: int) -> Iterator[None]:
    """In the block this process, the controller, has only so much left: see `limit`, which is for workers. Processes
    that are forked in the block have the same limit, also behind it."""
    number, limit_for = {
        "memory": (system.RLIMIT_AS, limit_on_memory),
        "files": (system.RLIMIT_NOFILE, limit_on_files),
        "file size": (system.RLIMIT_FSIZE, limit_on_file_size),
    }[resource]
    now, most = system.getrlimit(number)
    system.setrlimit(number, (limit_for(left), most))
    try:
        yield
    finally:
        system.setrlimit(number, (now, most))
