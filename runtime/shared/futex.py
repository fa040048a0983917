"""Sleeping on a word of shared memory (Linux `futex(2)`), and the fence that goes with it."""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import platform
from typing import Any

_SYSCALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_ARGUMENTS: Any = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]

# Waking takes about a microsecond, so it keeps the interpreter's lock; sleeping gives it to other threads.
_wake_call = ctypes.PyDLL(None, use_errno=True).syscall
_wake_call.argtypes = _ARGUMENTS
_wait_call = ctypes.CDLL(None, use_errno=True).syscall
_wait_call.argtypes = _ARGUMENTS
_number = _SYSCALL.get(platform.machine(), -1)


def supported() -> bool:
    return _number >= 0 and os.uname().sysname == "Linux"


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is still `seen` (its low 32 bits), at most `seconds`.

    Returns early for a wake, a signal, or no reason: callers look again in a loop.
    """
    timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if _wait_call(_number, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(timeout), None, 0) == -1:
        error = ctypes.get_errno()
        if error not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(error, os.strerror(error))


def wake(address: int) -> None:
    """Wake every process that sleeps on the word at `address`."""
    _wake_call(_number, address, _WAKE, _ALL, None, None, 0)


_new_lock = _thread.allocate_lock

ORDERED = platform.machine() == "x86_64"
"""Whether the processor keeps stores in order among themselves, and loads too."""

# A lock of its own for each fence: an interrupt may come between its being taken and its being given back.
if ORDERED:

    def fence() -> None:
        """Order all earlier stores before all later loads: taking a lock is a locked instruction, which does that."""
        _new_lock().acquire()

else:

    def fence() -> None:
        """Order all earlier loads and stores before all later ones: nothing moves past a release and the acquire that
        follows it."""
        lock = _new_lock()
        lock.acquire()
        lock.release()
        lock.acquire()
