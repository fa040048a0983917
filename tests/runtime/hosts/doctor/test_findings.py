"""What is made of facts: each lack has its remedy, and a machine without any is told nothing to do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from monarch.runtime.hosts.doctor.facts import Facts, Measured, Port
from monarch.runtime.hosts.doctor.findings import State, sections, worst
from tests.runtime.hosts.doctor.facts import (
    CONNECTX,
    FACTS,
    GIB,
    H100,
    LIMITS,
    MACHINE,
    NOW,
    certificates,
    found,
    limits,
    machine,
    tools,
)


def all_of(facts: Facts) -> list[tuple[State, tuple[str, ...]]]:
    return [(finding.state, finding.do) for section in sections(facts) for finding in section.findings]


def test_a_machine_with_everything_is_told_nothing_to_do() -> None:
    facts = machine(
        rdma=(CONNECTX,), gpus=(H100,), gpus_seen=("NVIDIA H100",), torch_for="CUDA 13", peer_memory="dmabuf"
    )
    assert all(state is State.GOOD and not do for state, do in all_of(facts))
    assert worst(sections(facts)) is State.GOOD


def test_a_small_machine_lacks_nothing_that_it_has_to_have() -> None:
    facts = replace(FACTS, certificates=replace(FACTS.certificates, folder="", found=False))
    assert {state for state, _ in all_of(facts)} == {State.GOOD, State.ABSENT}
    assert worst(sections(facts)) is State.ABSENT


LACKS = {
    "quota": (limits(quota=1.5), "machine", "cores", State.LACKING, "a quota of 1.5", "Give the container 8 CPUs"),
    "shared memory": (
        limits(shared_memory="Operation not permitted"), "machine", "shared memory", State.BROKEN,
        "Operation not permitted", "seccomp",
    ),
    "files": (limits(open_files=(1024, 524288)), "machine", "open files", State.LACKING, "1,024 at", "ulimit -n 65536"),
    "hard limit": (
        limits(open_files=(1024, 2048)), "machine", "open files", State.LACKING, "1,024", "hard limit of 2,048",
    ),
    "packages": (
        machine(versions={**MACHINE.versions, "grpcio": "", "cryptography": ""}), "packages", "missing", State.BROKEN,
        "grpcio, cryptography", "pip install grpcio cryptography",
    ),
    "compiler": (
        tools(compiler=""), "kernels", "C++ compiler", State.LACKING, "separate torch ops", "apt-get install g++",
    ),
    "headers": (
        tools(compiler_error="no <cmath>"), "kernels", "C++ compiler", State.LACKING, "no <cmath>", "libc6-dev",
    ),
    "cache": (tools(cache_error="others can write"), "kernels", "cache", State.LACKING, "others can", "MONARCH_CACHE"),
    "triton": (
        replace(tools(triton=""), machine=replace(MACHINE, gpus_seen=("NVIDIA H100",))),
        "kernels", "Triton", State.LACKING, "cannot be compiled", "monarchc[gpu]",
    ),
    "torch without GPUs": (
        machine(gpus_seen=("NVIDIA H100", "NVIDIA H100")), "GPUs", "GPUs", State.LACKING,
        "NVIDIA H100, NVIDIA H100: there, and this torch was built without", "Install a build of torch",
    ),
    "driver": (
        machine(gpus_seen=("NVIDIA H100",), torch_for="CUDA 13"), "GPUs", "GPUs", State.LACKING,
        "built for CUDA 13, cannot use", "--gpus all",
    ),
    "cable": (
        machine(rdma=(replace(CONNECTX, ports=(Port(1, "DOWN", "10 Gb/sec", "Ethernet"),)),)), "RDMA", "mlx5_0",
        State.LACKING, "port 1 down, Ethernet, 10 Gb/sec. None is active", "rdma link show mlx5_0",
    ),
    "container": (
        machine(rdma=(replace(CONNECTX, usable=False),)), "RDMA", "mlx5_0", State.LACKING, "cannot be opened",
        "--device=/dev/infiniband",
    ),
    "verbs": (
        machine(rdma=(CONNECTX,), rdma_missing="pyverbs: not installed"), "RDMA", "library", State.LACKING,
        "pyverbs: not installed", "apt-get install python3-pyverbs",
    ),
    "GPU memory": (
        machine(rdma=(CONNECTX,), gpus=(H100,)), "RDMA", "GPU memory", State.LACKING, "host memory", "nvidia-peermem",
    ),
    "locked memory": (
        machine(rdma=(CONNECTX,), limits=replace(LIMITS, locked_memory=(8 << 20, 8 << 20))), "machine",
        "locked memory", State.LACKING, "8.0 MiB may be registered", "ulimit -l unlimited",
    ),
    "software RDMA": (
        machine(software_rdma=True), "RDMA", "devices", State.ABSENT, "none", "rdma link add rxe0 type rxe",
    ),
    "tcp": (
        replace(FACTS, transports=(Measured("tcp", missing="refused"),)), "transports", "tcp", State.BROKEN,
        "refused", "",
    ),
    "verbs transport": (
        replace(FACTS, transports=(Measured("verbs", missing="no RDMA device"),)), "transports", "verbs", State.ABSENT,
        "no RDMA device", "",
    ),
    "cuda transport": (
        replace(FACTS, transports=(Measured("cuda", missing="no driver"),)), "transports", "cuda", State.ABSENT,
        "no driver", "",
    ),
    "no certificates": (
        certificates(folder="", found=False), "listening", "TLS", State.ABSENT, "loopback", "monarch ca",
    ),
    "bad certificates": (
        certificates(error="not signed"), "listening", "TLS", State.LACKING, "not signed", "monarch ca",
    ),
    "open certificates": (
        certificates(error="others can read it", remedy="chmod 600 key.pem"), "listening", "TLS", State.LACKING,
        "others can", "chmod 600",
    ),
    "expired": (
        certificates(expires=NOW - timedelta(days=1)), "listening", "TLS", State.LACKING, "expired on 2026-11-20",
        "monarch ca",
    ),
    "soon": (
        certificates(expires=NOW + timedelta(days=7)), "listening", "TLS", State.LACKING, "expires on 2026-11-28",
        "monarch ca",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKS)
def test_what_is_lacking_is_said_with_its_remedy(name: str) -> None:
    facts, title, what, state, says, remedy = LACKS[name]
    finding = found(facts, title, what)
    assert finding.state is state
    assert says in finding.found
    assert remedy in "\n".join(finding.do)
    assert list(State).index(worst(sections(facts))) >= list(State).index(state)


def test_locked_memory_matters_with_rdma_devices_only() -> None:
    facts = limits(locked_memory=(8 << 20, 8 << 20))
    with pytest.raises(ValueError, match="unpack"):
        found(facts, "machine", "locked memory")


def test_a_measured_transport_has_both_bandwidths() -> None:
    assert found(FACTS, "transports", "shm").found == "writes 9.0 GiB/s, reads 8.0 GiB/s"
    assert found(FACTS, "transports", "a plain copy").found == "10.0 GiB/s"


def test_certificates_in_order_are_named_with_their_hosts_and_end() -> None:
    finding = found(
        certificates(expires=datetime(2028, 2, 29, tzinfo=UTC), names=("node1", "10.0.0.1")), "listening", "TLS"
    )
    assert finding.found == "certificates in /home/me/node1 for node1, 10.0.0.1, valid until 2028-02-29"


def test_a_group_that_allows_less_memory_is_named() -> None:
    finding = found(limits(allowed=4 * GIB), "machine", "memory")
    assert finding.found == "60.0 GiB free of 64.0 GiB; the control group allows 4.0 GiB"
