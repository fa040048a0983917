"""Facts of machines that are not at hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from monarch.runtime.hosts.doctor.facts import (
    Certificates,
    Facts,
    Gpu,
    Limits,
    Machine,
    Measured,
    Port,
    RdmaDevice,
    Toolchain,
)
from monarch.runtime.hosts.doctor.findings import Finding, sections

GIB = 1 << 30
NOW = datetime(2026, 11, 21, tzinfo=UTC)

LIMITS = Limits(
    cores=8,
    installed=8,
    quota=None,
    memory=64 * GIB,
    available=60 * GIB,
    allowed=None,
    open_files=(65536, 65536),
    locked_memory=(None, None),
)
PACKAGES = ("torch", "grpcio", "protobuf", "cryptography", "cloudpickle", "numpy", "triton", "ray")
MACHINE = Machine("Linux 6.1, x86_64, Python 3.11", dict.fromkeys(("monarchc", *PACKAGES), "1.0"), LIMITS)
CONNECTX = RdmaDevice("mlx5_0", (Port(1, "ACTIVE", "100 Gb/sec (4X EDR)", "InfiniBand"),), usable=True)
H100 = Gpu("NVIDIA H100", 80 * GIB, "9.0")
FACTS = Facts(
    machine=MACHINE,
    transports=(Measured("shm", 9 * GIB, 8 * GIB), Measured("tcp", 2 * GIB, 2 * GIB)),
    copy=10 * GIB,
    toolchain=Toolchain("g++ 12.2.0 (/usr/bin/g++)", "", "3.6.0", "/home/me/.cache/monarch/kernels", 3, 30000),
    certificates=Certificates("/home/me/node1", True, names=("node1",), expires=datetime(2029, 1, 1, tzinfo=UTC)),
    now=NOW,
)


def machine(**changed: Any) -> Facts:
    return replace(FACTS, machine=replace(MACHINE, **changed))


def limits(**changed: Any) -> Facts:
    return machine(limits=replace(LIMITS, **changed))


def tools(**changed: Any) -> Facts:
    return replace(FACTS, toolchain=replace(FACTS.toolchain, **changed))


def certificates(**changed: Any) -> Facts:
    return replace(FACTS, certificates=replace(FACTS.certificates, **changed))


def found(facts: Facts, title: str, what: str) -> Finding:
    """One finding, by its section's title and its name."""
    (finding,) = (
        each for section in sections(facts) if section.title == title for each in section.findings if each.what == what
    )
    return finding
