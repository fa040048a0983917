"""The facts about a machine: plain data, as it was found, without a judgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use. `memory` in bytes, `capability` as "9.0" (NVIDIA) or "gfx942" (AMD)."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device, as the kernel describes it: "ACTIVE", "100 Gb/sec (4X EDR)", "InfiniBand"."""

    number: int
    state: str
    rate: str
    link_layer: str


@dataclass(frozen=True)
class RdmaDevice:
    """`usable` tells whether this user may open it."""

    name: str
    ports: tuple[Port, ...]
    usable: bool


@dataclass(frozen=True)
class Limits:
    """The resources of this process. Pairs are the limit in force and the one that it can be raised to; None is no
    limit.

    `cores`          it may run on, of `installed`; `quota` is how many of them it may keep busy
    `memory`         of the machine, in bytes, `available` of that, and `allowed` by its control group
    `open_files`     descriptors
    `locked_memory`  bytes that may be registered with an RDMA device
    `shared_memory`  why none can be had, or ""
    """

    cores: int
    installed: int
    quota: float | None
    memory: int
    available: int
    allowed: int | None
    open_files: tuple[int | None, int | None]
    locked_memory: tuple[int | None, int | None]
    shared_memory: str = ""


@dataclass(frozen=True)
class Machine:
    """`versions` has "" for a package that is not installed.

    `gpus_seen`    names of the GPUs that the kernel knows of, whether or not torch can use them
    `torch_for`    what torch was built for besides CPUs: "CUDA 12.8", "ROCm 6.4", or ""
    `rdma_missing` why the verbs library cannot be used, or ""
    `software_rdma` whether this kernel has the software RDMA device (rxe)
    `peer_memory`  how RDMA devices can reach GPU memory here: "dmabuf", "nvidia-peermem" or ""
    """

    system: str
    versions: dict[str, str]
    limits: Limits
    gpus_seen: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    torch_for: str = ""
    rdma: tuple[RdmaDevice, ...] = ()
    rdma_missing: str = ""
    software_rdma: bool = False
    peer_memory: str = ""


@dataclass(frozen=True)
class Measured:
    """A transport between two processes of this machine: bytes a second, each way, or `missing`: why it does not join
    them."""

    transport: str
    write: float = 0.0
    read: float = 0.0
    missing: str = ""


@dataclass(frozen=True)
class Toolchain:
    """`compiler` is what it says of itself and its path, or "", and `compiler_error` what it said of a small kernel.
    `cache` is the folder of built kernels, with their number and bytes, and `cache_error` why it cannot be used."""

    compiler: str
    compiler_error: str
    triton: str
    cache: str
    built: int = 0
    built_bytes: int = 0
    cache_error: str = ""


@dataclass(frozen=True)
class Certificates:
    """The files with which a host listens with TLS, where a folder of them was named. `error` is what is wrong with
    them, and `remedy` what to do, where that is known; `names` are the host's names and addresses in its certificate,
    and `expires` when its certificate or its authority's does."""

    folder: str
    found: bool
    error: str = ""
    remedy: str = ""
    names: tuple[str, ...] = ()
    expires: datetime | None = None


@dataclass(frozen=True)
class Facts:
    machine: Machine
    transports: tuple[Measured, ...]
    copy: float
    """Bytes a second of a plain copy in memory, to compare with."""
    toolchain: Toolchain
    certificates: Certificates
    now: datetime = field(compare=False)
