"""How meshes of hosts end: `stop` lets the hosts go, `shutdown` ends them."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import sys
from pathlib import Path

import pytest
import torch

import monarch
from monarch.actor import (
    Actor,
    ActorError,
    HostMesh,
    MeshFailure,
    Point,
    SupervisionError,
    endpoint,
    this_host,
    this_proc,
)
from monarch.distributed import Mesh
from tests.runtime.actors.agents import TOKEN, Hosts, hosts_here
from tests.runtime.actors.conftest import WAIT


class Cleaner(Actor):
    """Writes into a file when it ends in order."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def use(self, hosts: HostMesh) -> str:
        with pytest.raises(RuntimeError) as refused:
            hosts.stop()
        return str(refused.value)

    def __cleanup__(self, exc: Exception | None) -> None:
        Path(self.path).write_text(str(exc))


def test_a_slice_is_no_owner(tmp_path: Path) -> None:
    cleaners = this_host().spawn_procs(per_host={"gpus": 2}).spawn("cleaners", Cleaner, str(tmp_path / "ended"))
    with pytest.raises(RuntimeError, match="stop the whole mesh"):
        cleaners.slice(gpus=0).stop()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="shutdown_context"):
        this_proc().stop()


def test_stop_ends_what_was_spawned_and_leaves_the_hosts(two: Hosts, tmp_path: Path) -> None:
    hosts = monarch.hosts(two.addresses, token=TOKEN)
    part = hosts.slice(hosts=1)
    cleaner = part.spawn_procs().spawn("cleaner", Cleaner, str(tmp_path / "ended"))
    assert "was sent here: stop() is for the process that attached the hosts" in cleaner.use.call_one(hosts).get(WAIT)
    with pytest.raises(RuntimeError, match=r"is a part of 2 hosts: shutdown\(\) the whole"):
        part.shutdown()
    hosts.stop().get(WAIT)
    assert (tmp_path / "ended").read_text() == "None"
    with pytest.raises(SupervisionError):
        cleaner.use.call_one(None).get(WAIT)
    with pytest.raises(RuntimeError, match=r"stop\(\) of these hosts was called"):
        hosts.spawn_procs()
    with pytest.raises(RuntimeError, match=r"stop\(\) of these hosts was called"):
        hosts.shutdown()
    with pytest.raises(monarch.MonarchError, match="detached"):
        part.spawn_procs().spawn("cleaner", Cleaner, "").initialized.get(WAIT)
    with monarch.hosts(two.addresses, token=TOKEN) as again:
        assert again.spawn_procs().initialized.get(WAIT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["shutdown", "async with"])
def test_shutdown_ends_the_hosts(how: str, tmp_path: Path) -> None:
    with hosts_here(2, tmp_path) as serving:
        hosts = monarch.hosts(serving.addresses, token=TOKEN)
        cleaner = hosts.slice(hosts=0).spawn_procs().spawn("cleaner", Cleaner, str(tmp_path / "ended"))
        assert cleaner.initialized.get(WAIT)

        async def use() -> None:
            async with hosts:
                pass
            with pytest.raises(RuntimeError, match=r"shutdown\(\) of these hosts was called"):
                async with hosts:
                    pass

        if how == "shutdown":
            hosts.shutdown().get(WAIT)
        else:
            asyncio.run(use())
        assert [host.wait(WAIT) for host in serving.running] == [0, 0]
        assert (tmp_path / "ended").read_text() == "None"


def test_the_programs_own_host_can_be_stopped_and_not_shut_down(tmp_path: Path) -> None:
    here = this_host()
    cleaner = here.spawn_procs().spawn("cleaner", Cleaner, str(tmp_path / "ended"))
    assert cleaner.initialized.get(WAIT)
    with pytest.raises(RuntimeError, match="the program's own host ends with the program"):
        here.shutdown()
    here.stop().get(WAIT)
    assert (tmp_path / "ended").read_text() == "None"
    assert this_host().spawn_procs().initialized.get(WAIT)


def allowed() -> tuple[list[int], int]:
    return sorted(os.sched_getaffinity(0)), torch.get_num_threads()


def test_processes_run_on_the_cpus_that_they_are_bound_to() -> None:
    one, *_, other = sorted(os.sched_getaffinity(0)) * 2
    procs = this_host().spawn_procs(
        per_host={"gpus": 2}, proc_bind=[{"cpus": f"{one}-{one}"}, {"physcpubind": str(other), "cpus": "0-1023"}]
    )
    with procs.activate():
        assert monarch.remote(allowed).call().get(WAIT).values() == [([one], 1), ([other], 1)]


def test_a_host_that_does_not_have_such_cpus_says_so(faults: queue.SimpleQueue[MeshFailure]) -> None:
    procs = this_host().spawn_procs(name="crew", proc_bind=[{"cpus": "9000"}])
    with pytest.raises(ActorError, match="cannot run on the CPUs of cpus=9000"):
        procs.initialized.get(WAIT)
    assert faults.get(timeout=WAIT).mesh_name == "crew"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{}], "has 1 entries, and each host 2 processes"),
        ([{}, {"cpu": "1"}], r"proc_bind\[1\] has the key 'cpu': there are cpunodebind, membind, physcpubind, cpus"),
        ([{"cpus": "3-1"}, {}], r"""proc_bind\[0\]\["cpus"\] is '3-1': it has to be a list such as "0-3,8\""""),
        ([{"membind": "all"}, {}], "is 'all'"),
    ],
)
def test_bindings_that_cannot_be_meant_are_refused(given: list[dict[str, str]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        this_host().spawn_procs(per_host={"gpus": 2}, proc_bind=given)


def started() -> tuple[bool, str, str]:
    """Whether this interpreter has been started anew, and two variables of its environment."""
    fresh = "serve_fresh" in Path("/proc/self/cmdline").read_text()
    return fresh, os.environ.get("MONARCH_TEST_PLACE", ""), os.environ["MONARCH_TEST_PROGRAM"]


def test_processes_are_started_by_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONARCH_TEST_PROGRAM", "set")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nMONARCH_TEST_PLACE=own exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    hosts = pickle.loads(pickle.dumps(this_host().with_python_executable(python)))
    with hosts.spawn_procs().activate():
        assert monarch.remote(started).call().get(WAIT).values() == [(True, "own", "set")]
    with pytest.raises(monarch.MonarchError, match="its workers are forked, and not started with"):
        monarch.distribute(torch.ones(2), Mesh(data=2, hosts=hosts), "[@data]")

    def command(point: Point) -> list[str]:
        return ["env", f"MONARCH_TEST_PLACE={point['gpus']} of {point.size('gpus')}", sys.executable]

    procs = hosts.spawn_procs(per_host={"gpus": 2}, bootstrap_command=command)
    with procs.activate():
        assert monarch.remote(started).call().get(WAIT).values() == [(True, f"{gpu} of 2", "set") for gpu in range(2)]
    x = monarch.distribute(torch.arange(4.0), Mesh(data=2, procs=procs), "[@data]")
    assert monarch.program(lambda x: x.sum())(x).item() == 6.0
    procs.stop().get(WAIT)


def test_a_command_that_cannot_be_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", faults.put)
    procs = this_host().spawn_procs(bootstrap_command=["/nowhere/python"])
    with pytest.raises(ActorError, match="the bootstrap command /nowhere/python cannot be run: No such file"):
        procs.initialized.get(WAIT)
    assert faults.get(timeout=WAIT)
    for wrong in ("python3", [], lambda point: []):
        with pytest.raises(ValueError, match="a command is a list of words"):
            this_host().spawn_procs(bootstrap_command=wrong)  # type: ignore[arg-type]
