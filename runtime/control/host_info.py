"""A host's description of itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from pathlib import Path

from monarch.runtime.control import limits
from monarch.runtime.control.handshake import Release
from monarch.runtime.control.records import HostInfo


def release() -> Release:
    return Release(limits.PROTOCOL, version("monarchc"))


def version(distribution: str) -> str:
    """Without importing it; "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def describe(number: int, address: str, advertise: str = "", data_bind: str = "") -> HostInfo:
    return HostInfo(
        number,
        address,
        socket.gethostname(),
        cores(),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        os.getpid(),
        platform.python_version(),
        version("torch"),
        version("monarchc"),
        network(),
        advertise,
        data_bind,
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def network() -> str:
    """The identity of this machine, since it was started, and of this network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
