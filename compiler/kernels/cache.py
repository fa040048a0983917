"""The folders of built kernels and plans: their files are run, so only the user may have written them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from pathlib import Path

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError

_DIGEST = hashlib.sha256().digest_size


class BuildError(MonarchError):
    """A kernel that a compiler does not take, or a cache folder that cannot be trusted."""


def private_folder(folder: Path | str = "kernels") -> Path:
    """The folder, or the one of this name within the setting `cache`, made if need be. Raises BuildError unless it is
    the user's own and closed to others."""
    if isinstance(folder, str):
        folder = (settings.cache or Path.home() / ".cache" / "monarch") / folder
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = os.lstat(folder)
    except OSError as error:
        raise BuildError(
            f"cannot use {folder} for what is compiled: {error.strerror}", hint="see MONARCH_CACHE."
        ) from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise BuildError(
            f"{folder} holds what is compiled, and others than you can write or read there",
            hint=f"make it your own: chmod 700 {folder}, or name another folder in MONARCH_CACHE.",
        )
    return folder


def is_ours(path: Path) -> bool:
    """Whether a built object exists, a plain file that only the user can have written."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


def is_there(path: Path) -> bool:
    """Whether a built object exists; it is kept for another while."""
    if not is_ours(path):
        return False
    try:
        os.utime(path)
    except FileNotFoundError:  # another process has just forgotten it
        return False
    return True


def keep(made: Path, target: Path) -> None:
    """Let a built object appear under its name, all at once, with its digest behind it: a truncated or foreign file is
    then told from it (`is_whole`). A loader reads no further than the object itself."""
    with open(made, "r+b") as file:
        digest = _digest(target, file.read())
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
    os.replace(made, target)


def is_whole(path: Path) -> bool:
    """Whether a file that `is_ours` is an object as `keep` wrote it, under its name."""
    data = path.read_bytes()
    return _digest(path, data[:-_DIGEST]) == data[-_DIGEST:]


def _digest(path: Path, data: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + data).digest()


def forget(folder: Path) -> None:
    """Delete the objects that no process has asked for in a long time."""
    oldest = time.time() - settings.cache_keep
    for entry in (*folder.glob("*.so"), *folder.glob("*.gpu")):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if entry.lstat().st_mtime < oldest:
                entry.unlink()
