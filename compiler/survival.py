"""Which losses of workers and hosts a cluster survives with all values of a layout: a worker is left for each block.

A mesh dim that a layout does not name replicates a value. The workers that differ along such dims alone hold the same
block: the *copies* of it. So symmetry gives the answer, in time that does not depend on the number of workers. Only
where hosts have uneven parts of mesh dims, so that copies lie differently on hosts, they are gone through.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from monarch.compiler.layout import MeshSpec
from monarch.compiler.sizes import format_bytes
from monarch.compiler.tensor_type import TensorType

LOSSES = ("1 worker", "2 workers", "1 host", "1 host, 1 worker", "2 hosts")
"""What may be lost. In "1 host, 1 worker" the worker is on another host."""

Key = str | tuple[int, ...]


@dataclass(frozen=True)
class Fatal:
    """The losses of one kind, of `total` of them, that take all copies of a block: all of them, or for each of `keys`
    so many as `each`. A key is the mesh dim along which the two that are lost differ, or their numbers."""

    total: int
    all: bool = False
    keys: frozenset[Key] = frozenset()
    each: int = 1

    @property
    def count(self) -> int:
        return self.total if self.all else len(self.keys) * self.each

    def __or__(self, other: Fatal) -> Fatal:
        return Fatal(self.total, self.all or other.all, self.keys | other.keys, max(self.each, other.each))

    def __str__(self) -> str:
        if self.count in (0, self.total):
            return "all" if self.count else "none"
        dims = sorted(key for key in self.keys if isinstance(key, str))
        return f"{self.count:,} of {self.total:,}" + (f", along {' or '.join(dims)}" if dims else "")


def value_line(name: str, type: TensorType, mesh: MeshSpec) -> str:
    """A value as errors and tables name it: its type, and how much of it each worker holds."""
    return f"{name}: {type}, {format_bytes(worker_bytes(type, mesh))} a worker"


def worker_bytes(type: TensorType, mesh: MeshSpec) -> int:
    """How much of a value each worker holds."""
    return math.prod(type.local_shape(mesh)) * type.dtype.itemsize


COPY_EVERY = 10
"""After so many steps another worker gets the next copies (`Mesh.snapshots`)."""


@dataclass(frozen=True)
class Copies:
    """What has state survive any single loss of a worker or a host.

    `tensors`  those that some such loss takes a block of: another worker, on another host where there are several,
               keeps copies of their blocks
    `memory`   the bytes that a worker holds for that, at most: the last copies and the next, of what it keeps for
               another and of all state, which goes back with them
    `sent`     the bytes that a worker sends once in `COPY_EVERY` steps
    """

    tensors: tuple[str, ...] = ()
    memory: int = 0
    sent: int = 0


def copies_for(states: Mapping[str, TensorType], cluster: Cluster) -> Copies:
    """The cheapest copies by which a program's state survives any single loss; none where its layouts do."""
    lost = [name for name, type_ in states.items() if any(cluster.fatal(type_)[loss].count for loss in cluster.single)]
    sent = sum(worker_bytes(states[name], cluster.mesh) for name in lost)
    held = sum(worker_bytes(type_, cluster.mesh) for type_ in states.values())
    return Copies(tuple(lost), 2 * (held + sent), sent) if lost else Copies()


class Cluster:
    """A mesh's workers, in equal blocks in order on `hosts` hosts, or on the hosts that `hosts` names for each, in
    order. Raises ValueError where they do not divide."""

    def __init__(self, mesh: MeshSpec, hosts: int | Sequence[int] = 1) -> None:
        on = () if isinstance(hosts, int) else tuple(hosts)
        count = hosts if isinstance(hosts, int) else len(set(on))
        self._each = mesh.workers // max(1, count)
        uneven = any(host != on[0] + rank // self._each for rank, host in enumerate(on)) if on else False
        if not uneven and (count < 1 or mesh.workers % count):
            raise ValueError(f"{mesh} has {mesh.workers} workers, which cannot be divided evenly over {count} hosts")
        self.mesh, self.hosts = mesh, count
        self._on = on if uneven else None
        self._found: dict[frozenset[str], dict[str, Fatal]] = {}

    @property
    def losses(self) -> dict[str, int]:
        """The kinds of losses that leave some worker, and how many there are of each."""
        workers, hosts, each = self.mesh.workers, self.hosts, self._each
        if self._on is not None:
            sizes = Counter(self._on)
            mixed = sum(workers - size for size in sizes.values() if size + 1 < workers)
            found = {"1 worker": workers, "2 workers": math.comb(workers, 2), "1 host": hosts}
            found |= {"1 host, 1 worker": mixed, "2 hosts": math.comb(hosts, 2) if hosts > 2 else 0}
            return {loss: count for loss, count in found.items() if count and (loss != "2 workers" or workers > 2)}
        found = {"1 worker": workers, "2 workers": math.comb(workers, 2)} if workers > 1 else {}
        if hosts > 1:
            found |= {"1 host": hosts, "1 host, 1 worker": hosts * (workers - each), "2 hosts": math.comb(hosts, 2)}
        taken = dict(zip(LOSSES, (1, 2, each, each + 1, 2 * each), strict=True))
        return {loss: count for loss, count in found.items() if taken[loss] < workers}

    @property
    def single(self) -> list[str]:
        """The kinds of losses of one worker or one host."""
        return [loss for loss in self.losses if loss in ("1 worker", "1 host")]

    def fatal(self, type: TensorType) -> Mapping[str, Fatal]:
        """For each kind of loss those that take all copies of some block of a value."""
        along = frozenset(self.mesh.names) - set(type.layout.mesh_dims)
        if along not in self._found:
            self._found[along] = self._fatal(along)
        return self._found[along]

    def _fatal(self, along: frozenset[str]) -> dict[str, Fatal]:
        """Of values that the mesh dims `along` replicate."""
        totals, sizes = self.losses, self.mesh.sizes
        copies = math.prod(sizes[dim] for dim in along)
        twins = frozenset[Key](dim for dim in along if sizes[dim] == 2) if copies == 2 else frozenset[Key]()
        found: dict[str, tuple[bool, frozenset[Key], int]] = {
            "1 worker": (copies == 1, frozenset(), 1),
            "2 workers": (copies == 1, twins, self.mesh.workers // 2),
        }
        if self.hosts > 1:
            found |= self._fatal_hosts(along)
        return {name: Fatal(total, *found[name]) for name, total in totals.items()}

    def _fatal_hosts(self, along: frozenset[str]) -> dict[str, tuple[bool, frozenset[Key], int]]:
        outer = self._outer()
        if outer is None:
            return self._go_through(along)
        sizes = self.mesh.sizes
        hosts = math.prod(outer[dim] for dim in along)
        here = math.prod(sizes[dim] // outer[dim] for dim in along)
        twins = frozenset[Key](dim for dim in along if outer[dim] == 2) if hosts == 2 else frozenset[Key]()
        return {
            "1 host": (hosts == 1, frozenset(), 1),
            "1 host, 1 worker": (hosts == 1, twins if here == 1 else frozenset(), self.hosts * self._each),
            "2 hosts": (hosts == 1, twins, self.hosts // 2),
        }

    def _host(self, rank: int) -> int:
        return rank // self._each if self._on is None else self._on[rank]

    def _outer(self) -> dict[str, int] | None:
        """How many hosts each mesh dim crosses. None where a host is no row of whole dims and an even part of one."""
        if self._on is not None:
            return None
        left, found = self._each, {}
        for name, size in reversed(self.mesh.dims):
            inner = math.gcd(size, left)
            if inner != min(size, left):
                return None
            left //= inner
            found[name] = size // inner
        return found

    def _go_through(self, along: frozenset[str]) -> dict[str, tuple[bool, frozenset[Key], int]]:
        single, mixed, double = set[tuple[int, ...]](), set[tuple[int, ...]](), set[tuple[int, ...]]()
        everyone = range(self.mesh.workers)
        hosts = Counter(map(self._host, everyone))
        for copies in self._copies(along):
            on = Counter(map(self._host, copies))
            if len(on) == 1:
                (host,) = on
                single.add((host,))
                mixed |= {(host, rank) for rank in everyone if self._host(rank) != host}
                double |= {(min(host, other), max(host, other)) for other in hosts if other != host}
            elif len(on) == 2:
                double.add(tuple(sorted(on)))
                mixed |= {
                    (host, rank)
                    for host, rank in product(on, copies)
                    if self._host(rank) != host and on[self._host(rank)] == 1
                }
        mixed = {key for key in mixed if hosts[key[0]] + 1 < self.mesh.workers}
        found = {"1 host": single, "1 host, 1 worker": mixed, "2 hosts": double}
        return {name: (False, frozenset[Key](keys), 1) for name, keys in found.items()}

    def _copies(self, along: frozenset[str]) -> Iterable[tuple[int, ...]]:
        """The workers that hold each block."""
        dims = [name for name in self.mesh.names if name in along]
        apart = [range(size) if name not in along else range(1) for name, size in self.mesh.dims]
        for point in product(*apart):
            yield self.mesh.group(self.mesh.rank(dict(zip(self.mesh.names, point, strict=True))), dims)
