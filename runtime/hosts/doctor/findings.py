"""Judging the facts, and what to do about them: a function of the facts alone."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from monarch.compiler.plan import format_bytes
from monarch.runtime.hosts.doctor.facts import Certificates, Facts, Limits, Machine, Measured, Toolchain

OPEN_FILES = 4096
"""Fewer descriptors are used up by some hundred workers, with some for each worker and each connection."""
SOON = timedelta(days=30)


class State(enum.StrEnum):
    """GOOD: as it should be. ABSENT: the machine has none, and needs none. LACKING: not as good as it could be here, or
    not usable though the machine has it. BROKEN: Monarch does not work without it."""

    GOOD = "good"
    ABSENT = "absent"
    LACKING = "lacking"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """The subject `what`, its state `found`, and what to `do` about it, in lines; nothing where all is well."""

    what: str
    found: str
    state: State = State.GOOD
    do: tuple[str, ...] = ()


def _lacks(what: str, found: str, *do: str) -> Finding:
    return Finding(what, found, State.LACKING, do)


@dataclass(frozen=True)
class Section:
    title: str
    note: str
    findings: tuple[Finding, ...]


def sections(facts: Facts) -> tuple[Section, ...]:
    machine = facts.machine
    size = "64 MiB from one process of this machine to another"
    return (
        Section("machine", machine.system, tuple(_limits(machine.limits, bool(machine.rdma)))),
        Section("packages", "", tuple(_packages(machine.versions))),
        Section("kernels", "", tuple(_toolchain(facts.toolchain, bool(machine.gpus_seen)))),
        Section("GPUs", "", tuple(_gpus(machine))),
        Section("RDMA", "", tuple(_rdma(machine))),
        Section("transports", size, tuple(_transports(facts.transports, facts.copy))),
        Section("listening", "", tuple(_listening(facts.certificates, facts.now))),
    )


def worst(found: tuple[Section, ...]) -> State:
    states = [finding.state for section in found for finding in section.findings]
    return max(states, key=list(State).index, default=State.GOOD)


# -- machine -----------------------------------------------------------------------------------------------------------


def _limits(limits: Limits, rdma: bool) -> Iterator[Finding]:
    cores = f"{limits.cores} of {limits.installed}" if limits.cores != limits.installed else f"{limits.cores}"
    if limits.quota is not None and limits.quota < limits.cores:
        yield _lacks(
            "cores",
            f"{cores}, and a quota of {limits.quota:g}: the control group stops all threads when it is used up",
            f"Give the container {limits.cores} CPUs, or bind it to as many cores as it may use (cpuset).",
        )
    else:
        yield Finding("cores", cores)
    memory = f"{format_bytes(limits.available)} free of {format_bytes(limits.memory)}"
    if limits.allowed is not None:
        memory += f"; the control group allows {format_bytes(limits.allowed)}"
    yield Finding("memory", memory)
    if limits.shared_memory:
        yield Finding(
            "shared memory",
            f"none: {limits.shared_memory}",
            State.BROKEN,
            ("Workers share memory by memfd_create(2): allow that call in the container's seccomp profile.",),
        )
    else:
        yield Finding("shared memory", "all memory (/dev/shm is not used)")
    yield _open_files(*limits.open_files)
    if rdma:
        yield _locked_memory(*limits.locked_memory)


def _open_files(soft: int | None, hard: int | None) -> Finding:
    if soft is None or soft >= OPEN_FILES:
        return Finding("open files", "no limit" if soft is None else f"{soft:,}")
    do = [f"ulimit -n {min(hard or 65536, 65536)}, before Monarch is started (a service: LimitNOFILE=65536)."]
    if hard is not None and hard < OPEN_FILES:
        do = [f"Raise the hard limit of {hard:,} too: /etc/security/limits.conf, or docker run --ulimit nofile=65536."]
    found = f"{soft:,} at most: enough for small meshes, not for hundreds of workers or hosts"
    return _lacks("open files", found, *do)


def _locked_memory(soft: int | None, hard: int | None) -> Finding:
    if soft is None:
        return Finding("locked memory", "no limit")
    return _lacks(
        "locked memory",
        f"{format_bytes(soft)} may be registered with RDMA devices, and no more",
        "ulimit -l unlimited" + ("." if hard is None else ", allowed by memlock in /etc/security/limits.conf."),
        "A service: LimitMEMLOCK=infinity. A container: docker run --ulimit memlock=-1.",
    )


# -- packages and kernels ----------------------------------------------------------------------------------------------


OPTIONAL = {
    "triton": "needed only to compile programs for GPUs: pip install 'monarchc[gpu]'",
    "ray": "needed only for monarch.launch.ray: pip install ray",
}


def _packages(versions: dict[str, str]) -> Iterator[Finding]:
    needed = {name: found for name, found in versions.items() if name not in OPTIONAL}
    if missing := [name for name, found in needed.items() if not found]:
        do = f"pip install {' '.join(missing)}"
        yield Finding("missing", ", ".join(missing), State.BROKEN, (do,))
    yield Finding("installed", ", ".join(f"{name} {found}" for name, found in versions.items() if found))
    for name, why in OPTIONAL.items():
        if name in versions and not versions[name]:
            yield Finding(name, f"not installed; {why}", State.ABSENT)


def _toolchain(tools: Toolchain, gpus: bool) -> Iterator[Finding]:
    if not tools.compiler:
        yield _lacks(
            "C++ compiler",
            "none: kernels run as separate torch ops, which is slower",
            "apt-get install g++ (or clang).",
        )
    elif tools.compiler_error:
        yield _lacks(
            "C++ compiler",
            f"{tools.compiler} does not compile a small kernel: {tools.compiler_error}",
            "apt-get install g++ libc6-dev. Until then kernels run as separate torch ops.",
        )
    else:
        yield Finding("C++ compiler", tools.compiler)
    if tools.triton:
        yield Finding("Triton", tools.triton)
    elif gpus:
        yield _lacks(
            "Triton",
            "not installed: programs cannot be compiled for this machine's GPUs",
            "pip install 'monarchc[gpu]'",
        )
    if tools.cache_error:
        yield _lacks("cache", tools.cache_error, "Name a folder of your own in MONARCH_CACHE.")
    else:
        what = f"{tools.built:,} kernels, {format_bytes(tools.built_bytes)}" if tools.built else "empty"
        yield Finding("cache", f"{tools.cache} ({what})")


# -- devices -----------------------------------------------------------------------------------------------------------


def _gpus(machine: Machine) -> Iterator[Finding]:
    for number, gpu in enumerate(machine.gpus):
        yield Finding(f"GPU {number}", f"{gpu.name}, {format_bytes(gpu.memory)}, capability {gpu.capability}")
    if machine.gpus:
        return
    if not machine.gpus_seen:
        yield Finding("GPUs", "none", State.ABSENT)
        return
    seen = ", ".join(machine.gpus_seen)
    if machine.torch_for:
        yield _lacks(
            "GPUs",
            f"{seen}: there, and torch, built for {machine.torch_for}, cannot use them",
            'Read the output of python -c "import torch; torch.zeros(1).cuda()" says: usually the driver is too old,',
            "or the container was started without them (docker run --gpus all).",
        )
    else:
        yield _lacks(
            "GPUs",
            f"{seen}: there, and this torch was built without GPUs",
            "Install a build of torch for them: https://pytorch.org/get-started/locally",
        )


def _rdma(machine: Machine) -> Iterator[Finding]:
    if not machine.rdma:
        yield Finding("devices", "none below /sys/class/infiniband", State.ABSENT, _software_rdma(machine))
        return
    for device in machine.rdma:
        active = any(port.state == "ACTIVE" for port in device.ports)
        ports = "; ".join(f"port {p.number} {p.state.lower()}, {p.link_layer}, {p.rate}" for p in device.ports)
        if not device.usable:
            do = ("Start the container with its devices: docker run --device=/dev/infiniband --cap-add=IPC_LOCK.",)
            yield _lacks(device.name, f"{ports}. It cannot be opened", *do)
        elif not active:
            do = (f"See rdma link show {device.name}: a cable, or its network interface, is down.",)
            yield _lacks(device.name, f"{ports or 'no ports'}. None is active", *do)
        else:
            yield Finding(device.name, ports)
    if machine.rdma_missing:
        do = ("apt-get install python3-pyverbs ibverbs-providers, or pip install ibverbs.",)
        yield _lacks("library", machine.rdma_missing, *do)
    if machine.gpus and not machine.peer_memory:
        yield _lacks(
            "GPU memory",
            "goes through host memory: RDMA devices do not reach it",
            "Use NVIDIA's open kernel modules (nvidia-open), or modprobe nvidia-peermem.",
        )
    elif machine.gpus:
        yield Finding("GPU memory", f"is reached by RDMA devices ({machine.peer_memory})")


def _software_rdma(machine: Machine) -> tuple[str, ...]:
    if not machine.software_rdma:
        return ()
    return ("To try RDMA without one: modprobe rdma_rxe, rdma link add rxe0 type rxe netdev eth0 (iproute2).",)


def _transports(measured: tuple[Measured, ...], copy: float) -> Iterator[Finding]:
    for each in measured:
        if each.missing:
            yield Finding(each.transport, each.missing, _MISSING.get(each.transport, State.LACKING))
        else:
            rates = f"writes {format_bytes(each.write)}/s, reads {format_bytes(each.read)}/s"
            yield Finding(each.transport, rates)
    yield Finding("a plain copy", f"{format_bytes(copy)}/s")


_MISSING = {"tcp": State.BROKEN, "verbs": State.ABSENT, "cuda": State.ABSENT}
"""The finding of each device says what to do; a transport without its device has none."""


# -- listening ---------------------------------------------------------------------------------------------------------


def _listening(files: Certificates, now: datetime) -> Iterator[Finding]:
    remedy = "monarch ca DIR makes an authority, and certificates for hosts and controllers in folders below."
    if not files.found:
        found = "no certificates named: without them a host listens on loopback, or on a trusted network"
        yield Finding(
            "TLS", found, State.ABSENT, (remedy, "Name a host's in --tls or MONARCH_TLS to have them looked at.")
        )
        return
    names = f" for {', '.join(files.names)}" if files.names else ""
    if files.error:
        yield _lacks("TLS", files.error, files.remedy or remedy)
    elif files.expires is None or files.expires - now >= SOON:
        until = "" if files.expires is None else f", valid until {files.expires:%Y-%m-%d}"
        yield Finding("TLS", f"certificates in {files.folder}{names}{until}")
    else:
        how = "expired on" if files.expires <= now else "expires on"
        found = f"the certificate in {files.folder}{names} {how} {files.expires:%Y-%m-%d}"
        yield _lacks("TLS", found, remedy)
