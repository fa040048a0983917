"""Where a checkpoint is written: beside its path, until it is whole, and then in its place at once.

    model/            the last good checkpoint
    .model.saving/    the one that is being written; nobody reads it

A crash leaves the folder `.model.saving` behind, which the next save to the same path removes. On file systems that
cannot exchange two folders at once, a crash between the renames leaves the last good checkpoint at `.model.saving.old`:
whoever looks next puts it back."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from monarch.compiler.errors import CheckpointError
from monarch.runtime.shared.files import explain

logger = logging.getLogger("monarch")

_AT_FDCWD, _EXCHANGE = -100, 2


class Place:
    """The folder in which one checkpoint is written. `strangers(path)` names what stands at the path and is no part of
    a checkpoint of the format, so that a new one may not replace it; `file` is whether it is one file."""

    def __init__(self, path: Path, file: bool, strangers: Callable[[Path], list[str]]) -> None:
        """Raises CheckpointError."""
        self.path = path
        self.folder = saving_folder(path)
        self._file = file
        self._lock = -1
        self._parents: list[Path] = []
        """Those that this save has made, from the outermost on."""
        try:
            put_back(path)
            self._check(strangers)
            self._begin()
        except (BlockingIOError, FileNotFoundError):
            self.give_up()
            raise CheckpointError(
                f"{path} is being saved to already",
                hint="wait for that first: monarch.save(...).result(), or save to another path.",
            ) from None
        except (OSError, ValueError) as error:  # ValueError: no path has a zero byte
            self.give_up()
            why = explain(error, str(path)) if isinstance(error, OSError) else str(error)
            raise CheckpointError(
                f"cannot save to {str(path)!r}: {why}", hint="give a path where you may make folders."
            ) from None
        except BaseException:
            self.give_up()
            raise

    def _check(self, strangers: Callable[[Path], list[str]]) -> None:
        """Raise CheckpointError where the save would remove what is no checkpoint."""
        if not self.path.exists():
            return
        if self.path.samefile(Path.cwd()):
            raise CheckpointError(
                "a checkpoint cannot replace the current directory", hint="name a folder in it, or a file."
            )
        if found := strangers(self.path):
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            beside = self.path / "model.safetensors"
            raise CheckpointError(
                f"{self.path} exists, and is no checkpoint of this format alone: the save would remove "
                f"{', '.join(found[:3])}{more}",
                hint="give another path, or remove it."
                + (
                    f"\nBeside config.json goes a file: monarch.save(model, {str(beside)!r})."
                    * ("config.json" in found)
                ),
            )

    def _begin(self) -> None:
        """Make the folder, and lock it. Raises BlockingIOError and FileNotFoundError where another save has it."""
        missing = [parent for parent in self.path.parents if not parent.exists()]
        for parent in reversed(missing):
            with suppress(FileExistsError):
                _make(parent)
                self._parents.append(parent)
        if self.folder.is_symlink():  # what it points to is somebody's, and no unfinished save
            self.folder.unlink()
        with suppress(FileExistsError):
            _make(self.folder)
        lock = _locked(self.folder)
        if not os.path.samestat(os.fstat(lock), self.folder.stat()):  # it has become the checkpoint meanwhile
            os.close(lock)
            raise BlockingIOError
        self._lock = lock
        left = os.listdir(self.folder)
        if left:
            logger.warning("removing what a save to %s left that was not finished: %d files", self.path, len(left))
            for name in left:
                (self.folder / name).unlink()
        shutil.rmtree(former_of(self.path), ignore_errors=True)

    def finish(self) -> None:
        """Put the checkpoint in its place: whoever looks there sees the former one, or this one. Raises OSError."""
        _sync(self.folder)
        if self._file:
            os.replace(self.folder / self.path.name, self.path)
            self.folder.rmdir()
        elif not self.path.exists():
            os.rename(self.folder, self.path)
        else:
            former = _locked(self.path)  # nobody takes it for what another save has left
            try:
                _exchange(self.folder, self.path)
                shutil.rmtree(self.folder, ignore_errors=True)
            finally:
                os.close(former)
        _sync(self.path.parent)
        self._unlock()

    def give_up(self) -> None:
        """Remove what was written, and the folders that were made for it. The former checkpoint stays."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()
        with suppress(OSError):  # another save has put something there
            for parent in reversed(self._parents):
                parent.rmdir()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _make(folder: Path) -> None:
    """Make a folder in one that is there. Raises OSError."""
    try:
        folder.mkdir()
    except FileNotFoundError:  # /proc answers so
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(folder)) from None


def _locked(folder: Path) -> int:
    """The folder, opened, and locked where the file system has locks. Raises BlockingIOError where another save has
    locked it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        logger.debug("%s cannot be locked", folder)
    return fd


def place_of(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint of this path stands: a link is followed, as by what writes files, and stays a link. Raises
    CheckpointError for an address, such as one of s3, and for links that lead to themselves."""
    if isinstance(path, str) and re.match(r"[a-z][a-z0-9+.-]+://", path):
        raise CheckpointError(
            f"{path!r} is an address, and workers write and read files",
            hint="mount it, or copy the folder there once it is saved: monarch.save(state, folder).result().",
        )
    found = Path(path).absolute()
    try:
        return found.resolve() if found.is_symlink() else found
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to themselves
        why = explain(error, str(path)) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"no checkpoint can be at {str(path)!r}: {why}", hint="give another path.") from None


def saving_folder(path: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return path.parent / f".{path.name}.saving"


def former_of(path: Path) -> Path:
    """Where the former checkpoint is for a moment, if two folders cannot be exchanged at once."""
    folder = saving_folder(path)
    return folder.with_name(f"{folder.name}.old")


def put_back(path: Path) -> None:
    """Where a crash has left the last good checkpoint beside its path, and nothing there, put it back."""
    former = former_of(path)
    if path.exists() or not former.exists():
        return
    try:
        lock = _locked(saving_folder(path))
    except FileNotFoundError:
        lock = -1
    except BlockingIOError:  # the save goes on
        return
    with suppress(FileNotFoundError):  # another process has put it back
        os.rename(former, path)
        logger.warning("a save to %s ended between two renames: the checkpoint before it is back", path)
    if lock >= 0:
        os.close(lock)


def unfinished(path: Path) -> Path | None:
    """What a save to a path has left that was not finished, or is under way."""
    folder = saving_folder(path)
    return folder if folder.is_dir() else None


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(a: Path, b: Path) -> None:
    """Have two folders change names, at once. Where the file system cannot, one after the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE)
    if not failed:
        return
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(b))
    old = former_of(b)
    os.rename(b, old)
    os.rename(a, b)
    os.rename(old, a)


__all__ = ["Place", "former_of", "place_of", "put_back", "saving_folder", "unfinished"]
