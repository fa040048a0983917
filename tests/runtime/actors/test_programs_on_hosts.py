"""Programs on the processes of actors of two `monarch host` processes on this machine."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import monarch
from monarch import DeviceMeshError, MonarchError
from monarch.actor import Actor, MeshFailure, ProcMesh, endpoint, this_host
from monarch.distributed import Mesh
from tests.runtime.actors.agents import TOKEN, Hosts
from tests.runtime.actors.conftest import WAIT
from tests.runtime.actors.services import Service, lent, stop, values


@pytest.fixture
def procs(two: Hosts) -> Iterator[ProcMesh]:
    with monarch.hosts(two.addresses, token=TOKEN) as attached:
        yield attached.spawn_procs({"gpus": 2}, name="crew")


class Threads(Actor):
    """Counts what a process has."""

    @endpoint
    def files(self) -> int:
        return len(os.listdir("/proc/self/fd"))


def test_workers_are_in_the_processes_of_all_hosts(procs: ProcMesh) -> None:
    service = procs.spawn("service", Service)
    x = torch.arange(16.0).reshape(4, 4)
    with Mesh(procs=procs) as mesh:
        assert mesh.executor.worker_pids() == values(service.pid.call())  # type: ignore[attr-defined]
        placed = monarch.distribute(x, mesh, "[@hosts, @gpus]")
        assert torch.equal((placed @ placed.T).full_tensor(), x @ x.T)
        shards = [x[:2, :2], x[:2, 2:], x[2:, :2], x[2:, 2:]]
        assert all(map(torch.equal, values(service.get.call(placed)), shards))
        assert all(map(torch.equal, values(service.get.call(placed + 1)), [shard + 1 for shard in shards]))
        made = mesh.from_shards(service.make.shards(1, 2), "[@(hosts,gpus), -]")
        assert made.full_tensor().tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        seen = [at for _, _, _, at in values(service.look.call(made))]
        assert seen == [at[-1] for at in values(service.made_at.call())]
        with procs.activate():
            assert values(lent.call()) == [0] * 4
    assert values(service.get.call("alive")) == ["alive"] * 4


def test_closing_a_mesh_leaves_nothing_of_it(procs: ProcMesh) -> None:
    threads = procs.spawn("threads", Threads)
    service = procs.spawn("service", Service)
    counts = []
    for _ in range(3):
        with Mesh(procs=procs) as mesh:
            assert monarch.distribute(torch.ones(4), mesh, "[@(hosts,gpus)]").sum().item() == 4
        counts.append((values(threads.files.call()), values(service.maps.call())))
    assert counts[0] == counts[1] == counts[2]


def test_kill_9_is_the_end_of_the_mesh(procs: ProcMesh, faults: queue.SimpleQueue[MeshFailure]) -> None:
    service = procs.spawn("service", Service)
    with Mesh(procs=procs) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, "[@(hosts,gpus)]")
        assert x.sum().item() == 4
        pid = values(service.pid.call())[3]
        stop(pid)
        total = x.redistribute("[-]") * 2
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match=r"worker hosts=1, gpus=1 on host .* crew\[3\] was killed by SIGKILL"):
            total.full_tensor()
        assert faults.get(timeout=WAIT).status == -signal.SIGKILL
    assert service.slice(hosts=0, gpus=0).get.call_one(3).get(WAIT) == 3  # type: ignore[attr-defined]


def until(path: str) -> None:
    while not os.path.exists(path):
        os.sched_yield()


def test_a_bootstrap_that_takes_long_holds_up_no_other_mesh(two: Hosts, tmp_path: Path) -> None:
    path, sums = tmp_path / "go", []

    def use(mesh: Mesh) -> None:
        with mesh:
            sums.append(monarch.distribute(torch.ones(4), mesh).sum().item())

    with monarch.hosts(two.addresses, token=TOKEN) as attached:
        slow = attached.spawn_procs({"gpus": 1}, bootstrap=partial(until, str(path)))
        starting = threading.Thread(target=use, args=(Mesh(procs=slow),))
        starting.start()
        for _ in range(3):
            use(Mesh(data=2, hosts=attached))
        assert sums == [4] * 3
        path.touch()
        starting.join(WAIT)
        assert sums == [4] * 4


def test_a_mesh_is_on_one_host_or_on_all(procs: ProcMesh) -> None:
    with pytest.raises(MonarchError, match=r"which are on 1 hosts"):
        monarch.distribute(torch.ones(2), Mesh(procs=procs.slice(hosts=0)))
    local = this_host().spawn_procs({"gpus": 2})
    with Mesh(procs=local) as mesh:
        assert monarch.distribute(torch.ones(2), mesh, "[@gpus]").sum().item() == 2
