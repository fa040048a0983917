"""Copying to and from the memory of another process of the same user (Linux `process_vm_writev(2)`)."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

_PIECE = 1 << 30  # the kernel moves less than 2 GiB in one call
_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        function.argtypes = [
            ctypes.c_int,
            ctypes.POINTER(_Range),
            ctypes.c_ulong,
            ctypes.POINTER(_Range),
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]
    return function


_writev = _function("process_vm_writev")
_readv = _function("process_vm_readv")


def read(pid: int, there: int, here: int, size: int) -> None:
    """Copy `size` bytes from address `there` of the process to `here`. Raises OSError."""
    _move(_readv, pid, there, here, size)


def write(pid: int, there: int, here: int, size: int) -> None:
    """Copy `size` bytes from `here` to address `there` of the process. Raises OSError."""
    _move(_writev, pid, there, here, size)


def _move(function: Any, pid: int, there: int, here: int, size: int) -> None:
    done = 0
    while done < size:
        piece = min(_PIECE, size - done)
        near, far = _Range(here + done, piece), _Range(there + done, piece)
        moved = function(pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
        if moved <= 0:
            error = ctypes.get_errno() if moved < 0 else errno.EFAULT
            raise OSError(error, os.strerror(error))
        done += moved


def probe(pid: int, address: int, expected: bytes) -> str | None:
    """Why this process cannot read another's memory, where the bytes at `address` are known to be `expected`; None
    where it can."""
    if _readv is None or _writev is None:
        return "this system has no process_vm_readv"
    if pid <= 0:
        return "its process has no number in this process's namespace"
    found = ctypes.create_string_buffer(len(expected))
    try:
        read(pid, address, ctypes.addressof(found), len(expected))
    except OSError as error:
        return f"process_vm_readv: {error.strerror}"
    return None if found.raw == expected else "the process of that number is another one"


def permit(yama: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> None:
    """Let other processes of the same user at this one's memory, where Yama's mode 1 keeps it for its ancestors. The
    kernel knows one permitted process or all of them."""
    try:
        restricted = yama.read_text().strip() == "1"
    except OSError:
        return  # no Yama
    if restricted:
        ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)
