"""How much memory this machine can still give, and a clear error before that is exceeded.

Shared memory here is anonymous (`memfd_create(2)`): it needs no room in `/dev/shm`, and the kernel drops it with the
last process that maps it. But a page that the kernel cannot give is a bus error in the process that touches it, so the
kernel is asked first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from monarch.compiler.plan import MonarchError

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that may still be allocated: the kernel's estimate, or the rest of the control group's limit if that is
    less.

    None where neither can be read.
    """
    limits = [_meminfo(), cgroup("memory.max", "memory.current"), _cgroup_v1()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def new_file(name: str, size: int) -> int:
    """An anonymous file of so many zeros. Raises OSError, and has opened nothing then."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _meminfo() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup(limit: str, used: str, folder: Path = CGROUP) -> int | None:
    try:
        most, now = (folder / limit).read_text().strip(), (folder / used).read_text().strip()
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - int(now))


def _cgroup_v1() -> int | None:
    return cgroup("memory.limit_in_bytes", "memory.usage_in_bytes", CGROUP / "memory")


def require(size: int, what: str, available: Callable[[], int | None] = available_bytes) -> None:
    """Raise MonarchError where `size` bytes for `what` are more than the machine has left."""
    left = available()
    if left is not None and size > left:
        raise MonarchError(
            f"not enough memory for {what}: it takes {mebibytes(size)}, and {mebibytes(left)} are available",
            hint="Use fewer workers or smaller tensors, shard replicated ones, or raise the memory limit of this\n"
            "machine or container (/dev/shm is not used, so its size does not matter).",
        )


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
