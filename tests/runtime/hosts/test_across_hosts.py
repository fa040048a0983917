"""Every algorithm of all_reduce over hosts, with workers as threads and hosts as memories in one process."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from monarch.compiler.blocks import REDUCE
from monarch.compiler.plan import MeshSpec
from monarch.runtime.collectives import Collectives, Meetings
from monarch.runtime.collectives.chain import Results, reduce_in_chain
from monarch.runtime.collectives.cost import chain_is_faster, chain_scatters_faster, direct_is_faster
from monarch.runtime.collectives.meeting import Group
from monarch.runtime.collectives.mirror import Mirror
from monarch.runtime.collectives.reduce import reduce_far, reduce_shared, reduce_small
from monarch.runtime.shared import futex
from monarch.runtime.shared.blocks import Flat
from monarch.runtime.shared.window import Geometry, Window
from monarch.runtime.transport.interface import Region, Signal
from monarch.runtime.worker.peers import Peer


@dataclass
class Wire:
    """A link to a host whose memory is in this process: posts are there at once."""

    window: Window
    posted: int = 0

    def post(self, source: Any, region: Region, offset: int = 0, signal: Signal | None = None) -> None:
        data = memoryview(source).cast("B")
        self.window.bytes[offset : offset + len(data)] = data
        self.posted += len(data)
        if signal is not None:
            self.window.words[signal.offset // 8] = signal.value
            futex.fence()
            futex.wake(self.window.address + signal.offset)


class Hosts:
    def __init__(self, hosts: int, each: int) -> None:
        self.mesh = MeshSpec.of(h=hosts, w=each)
        self.windows = []
        for _ in range(hosts):
            fd = Window.create(Geometry.of(self.mesh.workers))
            self.windows.append(Window(Geometry.of(self.mesh.workers), fd))
            os.close(fd)
        self.wires: list[Wire] = []
        self.workers = [self._worker(rank, each) for rank in range(self.mesh.workers)]
        self.step = 0

    def _worker(self, rank: int, each: int) -> Collectives:
        here = rank // each
        peers: dict[int, Peer] = {}
        for host, window in enumerate(self.windows):
            if host != here:
                self.wires.append(Wire(window))
                region = Region(0, "", window.geometry.total, {})
                peers[host] = Peer(0, self.wires[-1], region)  # type: ignore[arg-type]
        window = self.windows[here]
        return Collectives(Meetings(self.mesh, rank, window, Mirror(self.mesh, rank, window, peers)), self.mesh)

    def all(self, act: Any) -> list[Any]:
        """What each worker's `act(worker, group of all)` gives, run at the same time as one step."""
        self.step += 1
        results: list[Any] = [None] * self.mesh.workers
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                worker = self.workers[rank]
                worker.at.begin(self.step)
                results[rank] = act(worker.at, worker.group(["h", "w"]))
                worker.at.announce()
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.mesh.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker waits for ever"
        assert not errors
        return results


def values(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def chain(worker: Meetings, group: Group, op: Any, source: Flat, target: Flat) -> None:
    reduce_in_chain(worker, group, op, source, Results(group, target))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("hosts", "each"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("length", [1, 3, 1000, 70_001, 2_000_000])
def test_every_algorithm_adds_in_the_groups_order(hosts: int, each: int, length: int) -> None:
    cluster = Hosts(hosts, each)
    op = REDUCE["sum"]
    expected = functools.reduce(torch.add, [values(rank, length) for rank in range(cluster.mesh.workers)])

    def by(algorithm: Any) -> Any:
        def act(worker: Meetings, group: Group) -> torch.Tensor:
            tensor, out = values(worker.rank, length), torch.empty(length)
            algorithm(worker, group, op, Flat([tensor]), Flat([out]))
            return out

        return act

    def small(worker: Meetings, group: Group) -> torch.Tensor:
        return reduce_small(worker, group, op, values(worker.rank, length))

    turns = [by(chain), by(reduce_shared), by(chain), by(chain)]
    if cluster.mesh.workers == 2:
        turns += [by(reduce_far), by(reduce_shared), by(reduce_far)]
    if 4 * length <= cluster.workers[0].at.area:
        turns += [small, by(chain), small]
    for act in turns:
        for out in cluster.all(act):
            assert torch.equal(out, expected)


@pytest.mark.parametrize(("hosts", "each"), [(2, 1), (2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("length", [1, 999, 300_000])
def test_a_chain_gives_each_worker_its_block(hosts: int, each: int, length: int) -> None:
    cluster = Hosts(hosts, each)
    k = cluster.mesh.workers
    whole = functools.reduce(torch.add, [values(rank, k * length) for rank in range(k)])

    def act(worker: Meetings, group: Group) -> torch.Tensor:
        out = torch.empty(length)
        source = Flat(list(values(worker.rank, k * length).chunk(k)))
        reduce_in_chain(worker, group, REDUCE["sum"], source, Results(group, Flat([out]), length))
        return out

    for _ in range(3):
        for rank, out in enumerate(cluster.all(act)):
            assert torch.equal(out, whole[rank * length : (rank + 1) * length])


@pytest.mark.parametrize("each", [1, 4])
def test_a_chain_moves_as_many_bytes_between_hosts_as_a_ring(each: int) -> None:
    cluster, length = Hosts(2, each), 1 << 20

    def act(worker: Meetings, group: Group) -> None:
        out = torch.empty(length)
        chain(worker, group, REDUCE["sum"], Flat([values(worker.rank, length)]), Flat([out]))

    cluster.all(act)
    assert sum(wire.posted for wire in cluster.wires) == 2 * 4 * length


def test_what_is_chosen() -> None:
    """A few of the model's answers: small things at once; what is large once between hosts; all to all where each
    host has one worker and there are many."""
    pair, four = Hosts(2, 1), Hosts(2, 4)
    area = pair.workers[0].at.area
    assert direct_is_faster(pair.workers[0].group(["h"]), area, area)
    group = four.workers[0].group(["h", "w"])
    assert direct_is_faster(group, 4 << 10, area)
    assert not direct_is_faster(group, 512 << 10, area)
    assert chain_is_faster(group, 16 << 20)
    assert not chain_is_faster(Hosts(4, 1).workers[0].group(["h"]), 16 << 20)
    assert chain_scatters_faster(group, 16 << 20) and not chain_scatters_faster(pair.workers[0].group(["h"]), 16 << 20)
    assert not chain_is_faster(four.workers[0].group(["w"]), 16 << 20)  # on one host
    assert not chain_is_faster(four.workers[0].group(["w", "h"]), 16 << 20)  # hosts take turns in its order
