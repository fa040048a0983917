"""Descriptions of machines: the speed and memory of their workers, and the links between them, level by level.

A cluster is described by a small TOML file. Those that ship stand in `clusters/`, each with its sources:

    description = "NVIDIA DGX H100: 8 GPUs a host"
    sources = ["NVIDIA DGX H100 datasheet"]
    target = "cuda:90"            # its workers compute at the rates of this one (`machine.MACHINES`)
    memory = "80GB"               # of a worker
    memory_bandwidth = 3.35e12    # bytes a second, where it is not the target's
    flops = { bf16 = 989e12 }     # operations a second, of dtypes in which it is not the target's
    attention = 0.6               # the part of these operations a second that attention comes to, where it is not 1
    start = 4e-6                  # seconds to start an op, where it is not the target's
    cores = 2                     # of a host, where more workers than these share them; else each has its own

    [[links]]                     # the innermost first
    within = "a host"
    workers = 8                   # that such a link connects; of the outermost, none: all
    bandwidth = 450e9             # bytes a second of each worker, in one direction
    latency = 10e-6               # seconds

    [[links]]
    within = "the cluster"
    bandwidth = 50e9
    latency = 25e-6

Workers are numbered row-major, and the first `workers` of them are on the first host. A collective is estimated as one
that goes level by level, as NCCL's trees and rings over several hosts do in the best case: an all_reduce reduces and
scatters within a host, does the same with its share among hosts, and gathers within the host (Thakur, Rabenseifner and
Gropp, IJHPCA 19(1), 2005, for the terms of each algorithm). These are bounds from what links can do at most.
"""

from __future__ import annotations

import difflib
import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monarch.compiler.cost.link import Link
from monarch.compiler.cost.machine import MACHINES, Machine
from monarch.compiler.errors import MonarchError, did_you_mean
from monarch.compiler.layout import ITEM_SIZES, MeshSpec
from monarch.compiler.sizes import parse_bytes

_SHIPPED = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Level:
    """One level of links: each group of `workers` that follow one another is connected by `link` (None: all are)."""

    within: str
    workers: int | None
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Hosts of a kind, and what connects their workers.

    `target`   what plans for it are compiled for
    `machine`  what one worker can do
    `memory`   the bytes that a worker may hold; None where nobody has said
    `levels`   its links, the innermost first
    `cores`    how many workers of a host compute at once, each at the machine's rates; None where all do
    """

    name: str
    description: str
    sources: tuple[str, ...]
    target: str
    machine: Machine
    memory: int | None
    levels: tuple[Level, ...]
    cores: int | None = None

    def share(self, workers: int) -> float:
        """How many times as long ops take where so many workers compute at once and share the cores: 4.0 for eight
        workers of a host with two."""
        return 1.0 if self.cores is None else max(1.0, min(workers, self.levels[0].workers or workers) / self.cores)

    def shared(self, workers: int) -> Cluster:
        """The same for a program of so many workers: ops and collectives within a host take longer by their `share`,
        and a worker may hold the less."""
        share = self.share(workers)
        inner = replace(self.levels[0], link=self.levels[0].link.slower(share))
        return replace(
            self,
            machine=self.machine.slower(share),
            memory=None if self.memory is None else int(self.memory / share),
            levels=(inner, *self.levels[1:]),
            cores=None,
        )

    def fans(self, mesh: MeshSpec, mesh_dims: Sequence[str]) -> tuple[int, ...]:
        """How a collective over these mesh dims spreads: for each level, of how many groups of the level below (of
        workers, for the first) its members within one group of this level are. Their product is the collective's size.
        Read off the collective of worker 0."""
        return _fans(tuple(level.workers for level in self.levels), mesh, tuple(mesh_dims))

    def seconds_of(self, op: str, sent: float, mesh: MeshSpec, mesh_dims: Sequence[str]) -> float:
        """Seconds for a collective of `sent` bytes (as `Value.sent`) over these mesh dims."""
        return self.collective_seconds(op, sent, self.fans(mesh, mesh_dims))

    def collective_seconds(self, op: str, sent: float, fans: Sequence[int]) -> float:
        """Seconds for a collective of `sent` bytes (as `Value.sent`) that spreads over the levels as `fans` says."""
        used = [(fan, level.link) for fan, level in zip(fans, self.levels, strict=True) if fan > 1]
        if not used:
            return self.machine.op_seconds(next(iter(self.machine.flops)), 0.0, 2 * sent)
        if op in ("permute", "broadcast"):
            link = used[-1][1]
            return link.latency + sent / link.bandwidth
        if op == "all_to_all":
            workers, inner, seconds = math.prod(fan for fan, _ in used), 1, 0.0
            for fan, link in used:
                seconds = max(seconds, sent * inner * (fan - 1) / workers / link.bandwidth)
                inner *= fan
            return seconds + used[-1][1].latency
        passes = 2.0 if op == "all_reduce" else 1.0
        seconds, share = 0.0, float(sent)
        for fan, link in used:
            seconds += link.latency + passes * share * (fan - 1) / fan / link.bandwidth
            share /= fan
        return seconds


@functools.lru_cache(1024)
def _fans(levels: tuple[int | None, ...], mesh: MeshSpec, mesh_dims: tuple[str, ...]) -> tuple[int, ...]:
    ranks = [0]
    for name in mesh_dims:
        stride = math.prod(size for _, size in mesh.dims[mesh.names.index(name) + 1 :])
        ranks = [rank + at * stride for rank in ranks for at in range(mesh.sizes[name])]
    found, groups = [], len(ranks)
    for workers in levels:
        now = 1 if workers is None else len({rank // workers for rank in ranks})
        found.append(-(-groups // now))
        groups = now
    return tuple(found)


@functools.cache
def cluster_of(target: str) -> Cluster:
    """The one host on which estimates for a target are made where no machine is named: its link connects all."""
    machine = MACHINES[target]
    return Cluster(target, "", (), target, machine, None, (Level("a host", None, machine.link),))


def load_cluster(name: str) -> Cluster:
    """The cluster of a TOML file, or one that ships, by name ("h100-8"). Raises MonarchError for an unknown name, and a
    file that is none."""
    path = Path(name) if name.endswith(".toml") else _SHIPPED / f"{name}.toml"
    if not name.endswith(".toml") and not path.is_file():
        there = f"There are {', '.join(shipped())}; a file of your own is named with .toml."
        raise MonarchError(f"no machine {name[:60]!r}", hint=did_you_mean(name, shipped()) + there)
    try:
        return _cluster(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise MonarchError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MonarchError(f"{path} is no TOML: {error}", hint=_SHOWN) from None
    except _Wrong as error:
        raise MonarchError(f"{path}: {error}", hint=_SHOWN) from None


_SHOWN = "docs/reference/monarchc.md shows what such a file has, and monarch doctor --measure FILE writes one."


def shipped() -> list[str]:
    """The names of the machines that ship."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


class _Wrong(Exception):
    """A key that a file should not have, or lacks."""


def _cluster(name: str, data: Mapping[str, Any]) -> Cluster:
    known = set("description sources target memory memory_bandwidth flops attention start cores links".split())
    if unknown := sorted(data.keys() - known):
        raise _Wrong(_unknown(unknown[0], "", sorted(known)))
    target = data.get("target")
    if target not in MACHINES:
        raise _Wrong(f"target = {target!r}, which is none of {', '.join(MACHINES)}")
    machine = MACHINES[target]
    if "memory_bandwidth" in data:
        machine = replace(machine, memory=_number(data, "memory_bandwidth"))
    if "attention" in data:
        machine = replace(machine, attention=_number(data, "attention"))
    if "start" in data:
        machine = replace(machine, start=_number(data, "start"))
    if "flops" in data:
        rates = data["flops"]
        if not isinstance(rates, dict) or rates.keys() - ITEM_SIZES.keys():
            raise _Wrong(f"flops = {rates!r}: it has a rate for each dtype, of {', '.join(ITEM_SIZES)}")
        given = {name: _number(rates, name) for name in rates}
        machine = replace(machine, flops={**machine.flops, **given})
    links = data.get("links")
    if not isinstance(links, list) or not links:
        raise _Wrong("no [[links]]: the links between its workers")
    levels = tuple(_level(link, number == len(links) - 1) for number, link in enumerate(links))
    for inner, outer in zip(levels, levels[1:], strict=False):
        if inner.workers is not None and outer.workers is not None and outer.workers % inner.workers:
            raise _Wrong(
                f"{outer.within} has {outer.workers} workers, which {inner.workers} of {inner.within} do not divide"
            )
    memory, cores = data.get("memory"), data.get("cores")
    if cores is not None and (type(cores) is not int or cores < 1):
        raise _Wrong(f"cores = {cores!r}, which is not a number of cores")
    return Cluster(
        name=name,
        description=str(data.get("description", "")),
        sources=tuple(map(str, data.get("sources", ()))),
        target=target,
        machine=replace(machine, link=levels[0].link),
        memory=None if memory is None else parse_bytes(memory, "memory"),
        levels=levels,
        cores=cores,
    )


_LINK = ("within", "workers", "bandwidth", "latency")


def _unknown(key: str, of: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    meant = f": did you mean {close[0]}?" if close else ";"
    return " ".join(filter(None, ("unknown key", repr(key), of))) + f"{meant} There are {', '.join(known)}"


def _level(data: Any, outermost: bool) -> Level:
    if not isinstance(data, dict):
        raise _Wrong(f"a link is {data!r}, and has {', '.join(_LINK)}")
    if unknown := sorted(data.keys() - set(_LINK)):
        raise _Wrong(_unknown(unknown[0], "of a link", _LINK))
    workers = data.get("workers")
    if (workers is None) is not outermost:
        raise _Wrong("all links but the last say how many `workers` they connect, and the last connects all")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise _Wrong(f"workers = {workers!r}, which is not a number of workers")
    return Level(str(data.get("within", "")), workers, Link(_number(data, "bandwidth"), _number(data, "latency")))


def _number(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _Wrong(f"{key} = {value!r}, which is not a number above 0")
    return float(value)
