"""On which CPUs, and from which memory, a process of actors runs: `spawn_procs(proc_bind=[{"cpus": "0-3"}, …])`.

The keys are options of numactl and taskset, and values lists such as "0-3,8": `cpus` and `physcpubind` name CPUs,
`cpunodebind` NUMA nodes whose CPUs are meant, and `membind` NUMA nodes from which all memory is to come. CPUs that
several keys name are those that all of them name.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from monarch.compiler.plan import MonarchError

Binding = tuple[tuple[str, str], ...]

KEYS = ("cpunodebind", "membind", "physcpubind", "cpus")
_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_LIST = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)


def bindings(given: Sequence[Mapping[str, str]] | None, processes: int) -> tuple[Binding, ...]:
    """The CPUs and memory nodes of each of a host's processes. Raises ValueError for a binding that no host has."""
    if given is None:
        return ()
    if len(given) != processes:
        raise ValueError(f"proc_bind has {len(given)} entries, and each host {processes} processes: give one for each")
    for number, each in enumerate(given):
        for key, value in each.items():
            if key not in KEYS:
                raise ValueError(f"proc_bind[{number}] has the key {key!r}: there are {', '.join(KEYS)}")
            if not isinstance(value, str) or not _LIST.fullmatch(value) or not numbers(value):
                raise ValueError(f'proc_bind[{number}]["{key}"] is {value!r}: it has to be a list such as "0-3,8"')
    return tuple(tuple(each.items()) for each in given)


def numbers(text: str) -> set[int]:
    """Those of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def bind(binding: Binding) -> None:
    """Bind this thread, and those that it starts. Raises MonarchError where this host does not have that."""
    wanted: set[int] | None = None
    for key, value in binding:
        if key == "membind":
            _bind_memory(value)
            continue
        cpus = set().union(*map(_cpus_of, numbers(value))) if key == "cpunodebind" else numbers(value)
        wanted = cpus if wanted is None else wanted & cpus
    if wanted is None:
        return
    told = " ".join(f"{key}={value}" for key, value in binding)
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        raise MonarchError(f"cannot run on the CPUs of {told}: {error.strerror}", hint=_have()) from None
    if missing := wanted - os.sched_getaffinity(0):
        raise MonarchError(f"cannot run on the CPUs of {told}: {sorted(missing)} are not here", hint=_have())


def _have() -> str:
    return f"this host has {os.cpu_count()} CPUs, from 0 on, and its NUMA nodes are in {_NODES}."


def _cpus_of(node: int) -> set[int]:
    try:
        return numbers((_NODES / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        raise MonarchError(f"there is no NUMA node {node} with CPUs here", hint=_have()) from None


def _bind_memory(value: str) -> None:
    nodes = numbers(value)
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise MonarchError(f"membind={value}: memory cannot be bound on {platform.machine()}")
    words = [0] * (max(nodes) // 64 + 1)
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    mask = (ctypes.c_uint64 * len(words))(*words)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(_MPOL_BIND), mask, ctypes.c_ulong(64 * len(words) + 1)):
        raise MonarchError(f"membind={value}: {os.strerror(ctypes.get_errno())}", hint=_have())
