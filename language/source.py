"""The user's line: which frame of the stack is the user's, and which expression of it is being run."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import sysconfig
from types import CodeType, FrameType, TracebackType

import torch

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError, Source

# Frames of these trees are machinery: torch, ourselves (language, compiler, stdlib, runtime), and Python's own library.
_OURS = tuple(
    os.path.join(os.path.realpath(os.path.join(os.path.dirname(os.path.realpath(__file__)), "..")), folder) + os.sep
    for folder in ("language", "compiler", "stdlib", "runtime")
)
_MACHINERY = (os.path.dirname(os.path.realpath(torch.__file__)) + os.sep, *_OURS)
_PYTHON = tuple(
    os.path.realpath(path) + os.sep for key in ("stdlib", "platstdlib") if (path := sysconfig.get_paths().get(key))
)
# Packages that a user installed live below the standard library's folder, and are the user's.
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

_sources: dict[tuple[int, int, Source | None], tuple[CodeType, Source]] = {}
"""The sources of instructions, by the code object's address, which stays its own while it is kept here: code objects
of two files may be equal, and to hash one reads all of it."""
_outermost: set[str] = set()


def belongs_to_user(code: CodeType) -> bool:
    """Whether the user, or a library that the user installed, wrote this code."""
    return is_users_file(code.co_filename)


@functools.cache
def is_users_file(file: str) -> bool:
    """Whether a file, by a code object's name for it, is the user's or an installed library's."""
    if file in _outermost:
        return True  # so that the walk up the stack ends there, and costs no more than without it
    if file.startswith("<frozen"):
        return False
    real = os.path.realpath(file)
    if real.startswith(_MACHINERY):
        return False
    return not real.startswith(_PYTHON) or any(part in real for part in _INSTALLED)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file is an installed library's."""
    real = os.path.realpath(file)
    return any(part in real for part in _INSTALLED)


@functools.cache
def _is_ours(file: str) -> bool:
    return os.path.realpath(file).startswith(_OURS)


def outermost(file: str) -> None:
    """Register that nothing above a frame of this file (a module's `__file__`) is the user's: code that runs users'
    files for them, such as the command line, is called by code that looks like a user's."""
    _outermost.add(file)
    is_users_file.cache_clear()


def user_frame() -> FrameType | None:
    """The innermost frame that is the user's, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is not None and frame.f_code.co_filename in _outermost else frame


def user_source() -> Source | None:
    """Where the user's program is now: file, line and columns; within a library, with the line that called it."""
    frame = user_frame()
    if frame is None:
        return None
    caller = _caller(frame) if is_installed(frame.f_code.co_filename) else None
    return _source_of(frame, caller)


def raised_at(error: BaseException) -> Source | None:
    """The innermost line of the user's that an error has passed on its way."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if is_users_file(frame.f_code.co_filename):
            caller = _caller(frame) if is_installed(frame.f_code.co_filename) else None
            found = Source(frame.f_code.co_filename, traceback.tb_lineno, caller=caller)
        traceback = traceback.tb_next
    return found


def shorten(error: BaseException) -> None:
    """Take out of an error's traceback our frames below the first, which has caught it, and the frames of torch and
    Python that they called. An error that is neither the user's nor was raised in the user's code is a defect of ours,
    and keeps them."""
    first = error.__traceback__
    kept: list[TracebackType] = []
    within, at = True, first
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        within = _is_ours(file) or (within and not is_users_file(file))
        if at is first or not within:
            kept.append(at)
        at = at.tb_next
    if settings.full_tracebacks or (within and not isinstance(error, MonarchError)):
        return
    short: TracebackType | None = None
    for at in reversed(kept):
        short = TracebackType(short, at.tb_frame, at.tb_lasti, at.tb_lineno)
    error.__traceback__ = short


def _source_of(frame: FrameType, caller: Source | None = None) -> Source:
    code, lasti = frame.f_code, frame.f_lasti
    known = _sources.get((id(code), lasti, caller))
    if known is None:
        if len(_sources) > 100_000:  # of a program that runs new code again and again, as `exec` makes it
            _sources.clear()
        known = _sources[id(code), lasti, caller] = code, _locate(code, lasti, frame.f_lineno, caller)
    return known[1]


def _caller(frame: FrameType | None) -> Source | None:
    """The line of the user's own files that called into the library in which a frame is, or None."""
    while frame is not None and frame.f_code.co_filename not in _outermost:
        code = frame.f_code
        if belongs_to_user(code) and not is_installed(code.co_filename):
            return _source_of(frame)
        frame = frame.f_back
    return None


def _locate(code: CodeType, lasti: int, line: int, caller: Source | None = None) -> Source:
    position = next(itertools.islice(code.co_positions(), lasti // 2, None), None)
    if position is None or position[0] is None or position[2] is None:
        return Source(code.co_filename, line, caller=caller)
    first, last, column, end = position
    assert first is not None and column is not None
    return Source(code.co_filename, first, column + 1, end + 1 if last == first and end is not None else 0, caller)


def calls_from(folder: str) -> bool:
    """Whether the nearest frame that is not ours belongs to a file whose path holds `folder`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and folder in frame.f_code.co_filename
