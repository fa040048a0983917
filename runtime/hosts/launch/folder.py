"""Folders for keys and tokens, which no process leaves behind for long.

The process that made one holds a lock in it. One that was killed has left its folders, but its locks are gone: the next
process that makes a folder removes all that are not locked any more. So it does not matter whether the two see each
other's processes (containers that share /tmp).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user can enter. It goes at the end of the block."""
    remove_abandoned()
    path = Path(tempfile.mkdtemp(prefix=_prefix()))
    # It gets its name only once it is locked, so that nobody takes the folder for an abandoned one.
    new = path / f"{LOCK}-new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(path / LOCK)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose makers are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with suppress(OSError):  # another process is at it too
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _prefix() -> str:
    return f"monarch-keys-{os.getuid()}-"
