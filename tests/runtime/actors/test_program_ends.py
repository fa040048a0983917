"""How programs on the processes of actors end, and what lives on."""

from __future__ import annotations

import os
import queue
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch import DeviceMeshError, MonarchError
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    ProcMesh,
    endpoint,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch.distributed import Mesh
from monarch.runtime.actors.processes import current
from monarch.runtime.controller.steps import Step
from monarch.runtime.shared import wire
from tests import python
from tests.runtime.actors.conftest import WAIT
from tests.runtime.actors.services import Service, mesh, procs, service, stop, values

__all__ = ["mesh", "procs", "service"]


def test_kill_9_of_a_process_is_the_end_of_the_mesh_and_a_failure(
    service: Service, mesh: Mesh, faults: queue.SimpleQueue[MeshFailure]
) -> None:
    x = monarch.distribute(torch.ones(4), mesh, "[@data]")
    assert x.sum().item() == 4
    pid = values(service.pid.call())[1]
    os.kill(pid, signal.SIGKILL)
    failure = faults.get(timeout=WAIT)
    assert (failure.mesh_name, failure.status) == ("service", -signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match=r"worker data=1 is gone: its process crew\[1\] was killed by SIGKILL"):
        (x + 1).full_tensor()
    assert service.slice(data=0).get.call_one(3).get(WAIT) == 3  # type: ignore[attr-defined]
    with pytest.raises(DeviceMeshError, match="SIGKILL"):
        service.slice(data=0).get.call_one(x)  # type: ignore[attr-defined]


def test_who_waits_in_a_collective_is_told(
    procs: ProcMesh, service: Service, mesh: Mesh, faults: queue.SimpleQueue[MeshFailure]
) -> None:
    """The worker that is left waits for the one that is killed, whose process stands still."""
    x = monarch.distribute(torch.ones(4), mesh, "[@data]")
    assert x.sum().item() == 4
    pid = values(service.pid.call())[1]
    stop(pid)
    total = x.redistribute("[-]")
    reply = service.slice(data=0).get.call_one(total)  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match="SIGKILL"):
        total.full_tensor()
    with pytest.raises(ActorError, match="has no value|is no more"):
        reply.get(WAIT)
    assert faults.get(timeout=WAIT).mesh_name == "service"


def test_a_worker_that_fails_itself_leaves_the_actors_alive(service: Service, mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(4), mesh, "[@data]")
    executor: Any = mesh.executor
    with executor.connection.lock:  # a command that there is not
        executor.connection.command(Step("nothing"), wire.numbers(99))
        executor.connection.publish()
    with pytest.raises(DeviceMeshError, match="worker data=. ended of KeyError: 99"):
        (x + 1).full_tensor()
    assert values(service.get.call("alive")) == ["alive"] * 2


def test_closing_the_mesh_leaves_the_actors_alive(service: Service, mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(4), mesh, "[@data]")
    service.keep.broadcast(x)
    assert x.sum().item() == 4
    mesh.close()
    assert values(service.get.call("alive")) == ["alive"] * 2
    with pytest.raises(MonarchError, match="closed"):
        service.get.call(x)
    with pytest.raises(MonarchError, match="closed"):
        mesh.from_shards(service.make.shards(1), "[@data]")


def test_what_was_sent_before_the_mesh_is_closed_arrives(procs: ProcMesh, service: Service) -> None:
    with Mesh(procs=procs) as mesh:
        x = monarch.distribute(torch.eye(400), mesh, "[@data, -]")
        for _ in range(100):
            x = x @ x.T
        service.keep.broadcast(x.redistribute("[-, -]"))
    assert all(torch.equal(whole, torch.eye(400)) for whole in values(service.show.call()))


def test_stopping_the_processes_is_the_end_of_the_mesh(procs: ProcMesh, mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(4), mesh, "[@data]")
    assert x.sum().item() == 4
    procs.stop("enough").get(WAIT)
    with pytest.raises(DeviceMeshError, match=r"its process crew\[\d\] was stopped"):
        (x + 1).full_tensor()
    with pytest.raises(MonarchError, match="cannot start the workers of mesh<data=2>"):
        monarch.distribute(torch.ones(2), Mesh(procs=procs))


class Limited(Actor):
    @endpoint
    def limit(self, more: int | None) -> None:
        """How many more files this process may open; None: as many as it could."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [fd for fd in range(1000) if not os.path.exists(f"/proc/self/fd/{fd}")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if more is None else free[more], hard))


@pytest.mark.parametrize("more", range(3))
def test_a_process_that_can_open_no_more_files_starts_no_worker(procs: ProcMesh, service: Service, more: int) -> None:
    limited = procs.spawn("limited", Limited)
    before = values(service.maps.call())
    driven = current.process().programs.driven
    limited.slice(data=1).limit.call_one(more).get(WAIT)  # type: ignore[attr-defined]
    with pytest.raises(MonarchError, match=r"cannot start the workers of mesh<data=2>: .*[Tt]oo many"):
        monarch.distribute(torch.ones(2), Mesh(procs=procs))
    limited.slice(data=1).limit.call_one(None).get(WAIT)  # type: ignore[attr-defined]
    with Mesh(procs=procs) as mesh:
        assert monarch.distribute(torch.ones(2), mesh, "[@data]").sum().item() == 2
    while driven:  # until the last worker has said that it is over
        os.sched_yield()
    port, receiver = Channel[int].open()
    service.when_maps.broadcast(before[0], port)
    assert [receiver.recv().get(WAIT) for _ in range(2)] == before


def test_shutting_actors_down_is_the_end_of_meshes_on_their_processes(procs: ProcMesh) -> None:
    meshes = [Mesh(procs=procs), Mesh(procs=this_proc())]
    placed = [monarch.distribute(torch.ones(2), mesh) for mesh in meshes]
    assert [x.sum().item() for x in placed] == [2, 2]
    shutdown_context().get(WAIT)
    for x in placed:
        with pytest.raises(DeviceMeshError, match="was stopped"):
            (x + 1).full_tensor()
    for each in meshes:
        each.close()
    with Mesh(procs=this_proc()) as mesh:  # what is made then starts anew
        assert monarch.distribute(torch.ones(2), mesh).sum().item() == 2


def test_a_program_may_end_with_meshes_open(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OPEN)
    result = python.run(program, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "4.0 4.0\n", "")


OPEN = """
import torch, monarch
from monarch.actor import this_host, this_proc
from monarch.distributed import Mesh

meshes = [Mesh(procs=this_host().spawn_procs({"data": 2})), Mesh(procs=this_proc())]
tensors = [monarch.distribute(torch.ones(4), mesh) for mesh in meshes]
print(*(x.sum().item() for x in tensors))
"""


def test_an_actor_can_drive_a_mesh_on_other_processes(procs: ProcMesh) -> None:
    service = procs.spawn("service", Service)
    before = values(service.maps.call())
    drivers = this_host().spawn_procs(name="driver")
    driver = drivers.spawn("driver", Driver)
    assert driver.run.call_one(procs).get(WAIT) == 6
    assert values(service.maps.call()) == [count + 1 for count in before]
    drivers.stop("enough").get(WAIT)
    port, receiver = Channel[int].open()
    service.when_maps.broadcast(before[0], port)
    assert [receiver.recv().get(WAIT) for _ in range(2)] == before


def test_workers_end_with_who_drives_them(procs: ProcMesh, faults: queue.SimpleQueue[MeshFailure]) -> None:
    """Also where a child that it has forked keeps its files open."""
    service = procs.spawn("service", Service)
    before = values(service.maps.call())
    driver = this_host().spawn_procs(name="driver").spawn("driver", Driver)
    assert driver.run.call_one(procs).get(WAIT) == 6
    pid, child = driver.fork.call_one().get(WAIT)
    try:
        os.kill(pid, signal.SIGKILL)
        assert faults.get(timeout=WAIT).status == -signal.SIGKILL
        port, receiver = Channel[int].open()
        service.when_maps.broadcast(before[0], port)
        assert [receiver.recv().get(WAIT) for _ in range(2)] == before
    finally:
        os.kill(child, signal.SIGKILL)


class Driver(Actor):
    @endpoint
    def fork(self) -> tuple[int, int]:
        """This process, and a child that does nothing."""
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        return os.getpid(), child

    @endpoint
    def run(self, procs: ProcMesh) -> float:
        self.mesh = Mesh(procs=procs)
        service = procs.spawn("service", Service)
        x = monarch.distribute(torch.ones(4), self.mesh, "[@data]")
        return sum(value.sum().item() for value in service.get.call(x).get().values()) + x[:2].sum().item()
