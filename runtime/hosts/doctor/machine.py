"""Facts of the machine, from the kernel's files and from torch. `root` is where those files are: "/", or a test's."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import resource
from pathlib import Path

from monarch.runtime.hosts.doctor.facts import Gpu, Limits, Machine, Port, RdmaDevice
from monarch.runtime.transport.verbs.adapter import NoVerbs, library

PACKAGES = ("torch", "grpcio", "protobuf", "cryptography", "cloudpickle", "numpy", "triton", "ray")


def look(root: Path = Path("/")) -> Machine:
    """All that is known without measuring."""
    gpus, built_for = gpus_of_torch()
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}",
        versions={name: version(name) for name in ("monarchc", *PACKAGES)},
        limits=limits(root),
        gpus_seen=gpus_seen(root),
        gpus=gpus,
        torch_for=built_for,
        rdma=rdma_devices(root),
        rdma_missing=verbs_missing(),
        software_rdma=software_rdma(root),
        peer_memory=peer_memory(root),
    )


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    """The text of one of the kernel's files; "" where it is not there or not for us."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


# -- limits ------------------------------------------------------------------------------------------------------------


def limits(root: Path) -> Limits:
    page = os.sysconf("SC_PAGE_SIZE")
    memory = os.sysconf("SC_PHYS_PAGES") * page
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    quota, allowed = control_group(root)
    return Limits(
        cores=len(os.sched_getaffinity(0)),
        installed=os.cpu_count() or 1,
        quota=quota,
        memory=memory,
        available=int(free[1]) * 1024 if free else memory,
        allowed=None if allowed is None or allowed >= memory else allowed,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory=_shared_memory(),
    )


def _limit(which: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard


def _shared_memory() -> str:
    try:
        with os.fdopen(os.memfd_create("monarch-doctor", os.MFD_CLOEXEC), "w+b") as file:
            os.ftruncate(file.fileno(), mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
    except OSError as error:
        return f"{error.strerror} (memfd_create)"
    return ""


def control_group(root: Path) -> tuple[float | None, int | None]:
    """How many cores and how many bytes of memory the control groups allow, which may be nested: the least of them.
    Both versions: one hierarchy ("0::/a/b"), and one for each resource ("3:memory:/a/b")."""
    quotas: list[float] = []
    sizes: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for folder in (Path(path), *Path(path).parents):
            inside = str(folder).lstrip("/")
            if not controllers:
                at = root / "sys/fs/cgroup" / inside
                quota, _, period = _read(at / "cpu.max").partition(" ")
                if quota.isdecimal() and period.isdecimal():
                    quotas.append(int(quota) / int(period))
                if (size := _read(at / "memory.max")).isdecimal():
                    sizes.append(int(size))
            for controller in controllers.split(","):
                at = root / "sys/fs/cgroup" / controller / inside
                quota, period = _read(at / "cpu.cfs_quota_us"), _read(at / "cpu.cfs_period_us")
                if controller == "cpu" and quota.isdecimal() and period.isdecimal():
                    quotas.append(int(quota) / int(period))
                if controller == "memory" and (size := _read(at / "memory.limit_in_bytes")).isdecimal():
                    sizes.append(int(size))
    return min(quotas, default=None), min(sizes, default=None)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpus_seen(root: Path) -> tuple[str, ...]:
    """NVIDIA's by the names that its driver gives, and AMD's by their architecture, whatever torch can do."""
    found = []
    folder = root / "proc/driver/nvidia/gpus"
    for name in _names(folder):
        model = re.search(r"^Model:\s*(.*)$", _read(folder / name / "information"), re.MULTILINE)
        found.append(model[1] if model else f"NVIDIA GPU {name}")
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    for name in _names(folder):
        architecture = re.search(r"^gfx_target_version (\d+)$", _read(folder / name / "properties"), re.MULTILINE)
        if architecture and int(architecture[1]):  # 0 is a CPU
            number = int(architecture[1])
            found.append(f"AMD gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}")
    return tuple(found)


def gpus_of_torch() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that torch can use, and the CUDA version that it was built for."""
    import torch

    built_for = ""
    if torch.version.hip:
        built_for = f"ROCm {torch.version.hip.partition('-')[0]}"
    elif torch.version.cuda:
        built_for = f"CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return (), built_for
    found = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        capability = about.gcnArchName.partition(":")[0] if torch.version.hip else f"{about.major}.{about.minor}"
        found.append(Gpu(about.name, about.total_memory, capability))
    return tuple(found), built_for


# -- RDMA --------------------------------------------------------------------------------------------------------------


def rdma_devices(root: Path) -> tuple[RdmaDevice, ...]:
    folder = root / "sys/class/infiniband"
    found = []
    for name in _names(folder):
        ports = []
        for number in _names(folder / name / "ports"):
            at = folder / name / "ports" / number
            state = _read(at / "state").partition(":")[2].strip()  # "4: ACTIVE"
            ports.append(Port(int(number), state, _read(at / "rate"), _read(at / "link_layer")))
        verbs = _names(folder / name / "device/infiniband_verbs")
        if not verbs:  # a software device hangs below no bus
            all_ = root / "sys/class/infiniband_verbs"
            verbs = [each for each in _names(all_) if _read(all_ / each / "ibdev") == name]
        usable = any(os.access(root / "dev/infiniband" / each, os.R_OK | os.W_OK) for each in verbs)
        found.append(RdmaDevice(name, tuple(ports), usable))
    return tuple(found)


def verbs_missing() -> str:
    """Why no library speaks to RDMA devices here, or ""."""
    try:
        library()
    except NoVerbs as error:
        return str(error)
    return ""


def software_rdma(root: Path) -> bool:
    modules = root / "lib/modules" / platform.release()
    built_in = "/rdma_rxe.ko" in _read(modules / "modules.builtin")
    return built_in or "/rdma_rxe.ko" in _read(modules / "modules.dep") or (root / "sys/module/rdma_rxe").is_dir()


def peer_memory(root: Path) -> str:
    """NVIDIA's open kernel modules export GPU memory as dmabuf, and so does amdgpu; with the closed ones it takes
    nvidia-peermem."""
    if "Open Kernel Module" in _read(root / "proc/driver/nvidia/version") or (root / "sys/module/amdgpu").is_dir():
        return "dmabuf"
    return "nvidia-peermem" if (root / "sys/module/nvidia_peermem").is_dir() else ""
