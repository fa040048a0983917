"""Facts are read off the kernel's files: those of made-up machines, and this one's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarch.runtime.hosts.doctor import machine
from monarch.runtime.hosts.doctor.facts import Port, RdmaDevice


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine() -> None:
    here = machine.look()
    assert here.limits.cores == len(os.sched_getaffinity(0))
    assert 0 < here.limits.available <= here.limits.memory
    assert here.limits.shared_memory == ""
    assert here.versions["torch"] and here.versions["grpcio"] and here.versions["monarchc"]
    assert bool(here.rdma_missing) or here.rdma


def test_control_groups_in_one_hierarchy(tmp_path: Path) -> None:
    """The least of what the group and those around it allow."""
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/cpu.max": "max 100000",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000",
            "sys/fs/cgroup/pod/app/cpu.max": "400000 100000",
            "sys/fs/cgroup/pod/memory.max": "max",
            "sys/fs/cgroup/pod/app/memory.max": "1073741824",
        },
    )
    assert machine.control_group(root) == (1.5, 1 << 30)
    assert machine.limits(root).allowed == 1 << 30


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/app\n2:memory:/app\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/memory/app/memory.limit_in_bytes": "2147483648",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert machine.control_group(root) == (0.5, 2 << 30)


def test_without_the_kernels_files_there_are_no_limits_and_no_devices(tmp_path: Path) -> None:
    assert machine.control_group(tmp_path) == (None, None)
    assert machine.gpus_seen(tmp_path) == ()
    assert machine.rdma_devices(tmp_path) == ()
    assert machine.peer_memory(tmp_path) == ""
    assert not machine.software_rdma(tmp_path)


def test_rdma_devices(tmp_path: Path) -> None:
    port = "sys/class/infiniband/{}/ports/1/"
    root = files(
        tmp_path,
        {
            port.format("mlx5_0") + "state": "4: ACTIVE\n",
            port.format("mlx5_0") + "rate": "100 Gb/sec (4X EDR)\n",
            port.format("mlx5_0") + "link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_0/device/infiniband_verbs/uverbs0/dev": "231:192",
            "dev/infiniband/uverbs0": "",
            port.format("rxe0") + "state": "1: DOWN\n",
            port.format("rxe0") + "rate": "2.5 Gb/sec (1X SDR)\n",
            port.format("rxe0") + "link_layer": "Ethernet\n",
            "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n",
            "sys/class/infiniband_verbs/uverbs1/ibdev": "rxe0\n",
        },
    )
    assert machine.rdma_devices(root) == (
        RdmaDevice("mlx5_0", (Port(1, "ACTIVE", "100 Gb/sec (4X EDR)", "InfiniBand"),), usable=True),
        RdmaDevice("rxe0", (Port(1, "DOWN", "2.5 Gb/sec (1X SDR)", "Ethernet"),), usable=False),
    )
    files(root, {"dev/infiniband/uverbs1": ""})
    assert all(device.usable for device in machine.rdma_devices(root))


def test_gpus_that_the_kernel_knows(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        {
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n",
            "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 64\ngfx_target_version 0\n",
            "sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 0\ngfx_target_version 90402\n",
            "sys/class/kfd/kfd/topology/nodes/2/properties": "cpu_cores_count 0\ngfx_target_version 90010\n",
        },
    )
    assert machine.gpus_seen(root) == ("NVIDIA H100 80GB HBM3", "AMD gfx942", "AMD gfx90a")


@pytest.mark.parametrize(
    ("file", "text", "how"),
    [
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1", "dmabuf"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.1", ""),
        ("sys/module/nvidia_peermem/refcnt", "0", "nvidia-peermem"),
        ("sys/module/amdgpu/refcnt", "0", "dmabuf"),
    ],
)
def test_how_devices_reach_gpu_memory(tmp_path: Path, file: str, text: str, how: str) -> None:
    assert machine.peer_memory(files(tmp_path, {file: text})) == how


def test_the_software_device_is_a_module_of_this_kernel(tmp_path: Path) -> None:
    modules = f"lib/modules/{os.uname().release}/modules.dep"
    assert not machine.software_rdma(files(tmp_path, {modules: "kernel/drivers/net/veth.ko:\n"}))
    assert machine.software_rdma(files(tmp_path, {modules: "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko: a b\n"}))


def test_memory_that_cannot_be_shared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert machine.limits(Path("/")).shared_memory == "Operation not permitted (memfd_create)"
