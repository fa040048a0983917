"""The place of a checkpoint: beside its path, until it is whole, and then at its path at once.

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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import repeat, starmap
from pathlib import Path

from monarch.compiler.errors import CheckpointError
from monarch.runtime.shared.files import explain

logger = logging.getLogger("monarch")

_AT_FDCWD, _EXCHANGE = -100, 2
_open = partial(os.open, flags=os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class SaveFolder:
    """The folder in which one checkpoint is written, once it has begun; `file` is whether that is one file. Its maker
    has it before it begins, and calls `finish` or `give_up`, whatever interrupts the time between."""

    def __init__(self, path: Path, file: bool) -> None:
        self.path = path
        self.folder = saving_folder(path)
        self._file = file
        self._lock: list[int] = []
        """The descriptor of the folder, which is locked, or is about to be."""
        self._replaces = False
        """Whether a former checkpoint is at the path."""
        self._begun = False
        """Whether the lock is this save's, and so the folder."""
        self._parents: list[Path] = []
        """Those that this save has made, from the outermost on."""

    def begin(self, strangers: Callable[[Path], list[str]]) -> None:
        """Make the folder, and lock it. `strangers(path)` names files at the path that are no part of a checkpoint of
        the format, so that a new one may not replace them. Raises CheckpointError."""
        try:
            put_back(self.path)
            self._check(strangers)
            self._replaces = any(self.path.iterdir()) if self.path.is_dir() else self.path.exists()
            self._begin()
        except (BlockingIOError, FileNotFoundError):
            raise CheckpointError(
                f"{self.path} is being saved to already",
                hint="wait for that first: monarch.save(...).result(), or save to another path.",
            ) from None
        except (OSError, ValueError) as error:  # ValueError: no path has a zero byte
            why = explain(error, str(self.path)) if isinstance(error, OSError) else str(error)
            raise CheckpointError(
                f"cannot save to {str(self.path)!r}: {why}", hint="give a path where you may make folders."
            ) from None

    def _check(self, strangers: Callable[[Path], list[str]]) -> None:
        """Raise CheckpointError where the save would remove files that are no checkpoint."""
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
        if self.folder.is_symlink():  # its target is another's, and no unfinished save
            self.folder.unlink()
        with suppress(FileExistsError):
            _make(self.folder)
        _lock(self.folder, self._lock)
        if not os.path.samestat(os.fstat(self._lock[0]), self.folder.stat()):  # it has become the checkpoint meanwhile
            raise BlockingIOError
        self._begun = True
        left = os.listdir(self.folder)
        if left:
            logger.warning("removing the files that an unfinished save to %s left: %d", self.path, len(left))
            for name in left:
                (self.folder / name).unlink()
        shutil.rmtree(former_of(self.path), ignore_errors=True)

    @property
    def stays(self) -> str:
        """What is at the path if the save ends before `finish`."""
        return "the former checkpoint is still there" if self._replaces else f"no checkpoint is at {self.path}"

    def finish(self) -> None:
        """Put the checkpoint in its place: a reader sees the former one, or this one. Raises OSError."""
        _sync(self.folder)
        if self._file:
            os.replace(self.folder / self.path.name, self.path)
            self.folder.rmdir()
        elif not self.path.exists():
            os.rename(self.folder, self.path)
        else:
            former: list[int] = []
            try:
                _lock(self.path, former)  # no save takes it for the rest of another
                _exchange(self.folder, self.path)
                shutil.rmtree(self.folder, ignore_errors=True)
            finally:
                _close(former)
        _sync(self.path.parent)
        self._begun = False
        _close(self._lock)

    def give_up(self) -> None:
        """Remove the written files, and the folders that were made for them. The former checkpoint stays. Call it once
        no worker writes there any more."""
        if self._begun:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._begun = False
        _close(self._lock)
        with suppress(OSError):  # another save has put something there
            for parent in reversed(self._parents):
                parent.rmdir()


def _make(folder: Path) -> None:
    """Make a folder in an existing one. Raises OSError."""
    try:
        folder.mkdir()
    except FileNotFoundError:  # /proc answers so
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(folder)) from None


def _lock(folder: Path, held: list[int]) -> None:
    """Open a folder, and lock it where the file system has locks. The caller that gives the list for its descriptor
    closes the open ones. Raises BlockingIOError where another save has locked it."""
    held.extend(map(_open, [str(folder)]))  # in one call: an interrupt comes before it is open, or when the list has it
    try:
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        logger.debug("%s cannot be locked", folder)


def _close(held: list[int]) -> None:
    """Close descriptors, in one call, too."""
    deque(map(os.close, starmap(held.pop, repeat((), len(held)))), maxlen=0)


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
    held: list[int] = []
    try:
        with suppress(FileNotFoundError):
            _lock(saving_folder(path), held)
        with suppress(FileNotFoundError):  # another process has put it back
            os.rename(former, path)
            logger.warning("a save to %s ended between two renames: the checkpoint before it is back", path)
    except BlockingIOError:  # the save goes on
        return
    finally:
        _close(held)


def unfinished(path: Path) -> Path | None:
    """The files of a save to a path that was not finished, or is under way."""
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


__all__ = ["SaveFolder", "former_of", "place_of", "put_back", "saving_folder", "unfinished"]
