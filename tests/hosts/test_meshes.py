"""Meshes over hosts that are network namespaces: the same numbers as on one host, and what happens when hosts fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import monarch
from monarch import HostMesh
from monarch.actor import Actor, endpoint
from monarch.compiler.plan import DeviceMeshError, MeshSpec, MonarchError
from monarch.compiler.plan.options import CompileOptions
from monarch.distributed import Mesh
from tests import python
from tests.hosts.cluster import Cluster, cluster
from tests.hosts.network import Network, network
from tests.runtime.building import Building, each, whole

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts for all tests that leave them as they were."""
    with network(2) as made, cluster(made, tmp_path_factory.mktemp("two")) as two:
        yield two


@pytest.fixture
def fragile(two_hosts: Network, tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts for one test, which breaks them."""
    with cluster(two_hosts, tmp_path) as made:
        yield made


def train(made: Cluster, *arguments: str) -> dict[str, list[object]]:
    hosts = ",".join(made.addresses)
    security = ["--tls", str(made.tls)] if made.token is None else ["--token", str(made.token), "--trusted-network"]
    command = ["-m", "tests.hosts.train", hosts, *security, *arguments]
    done = python.run(*command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


def test_training_over_two_hosts_gives_the_numbers_of_one(two: Cluster) -> None:
    """To the bit, over TLS: with the batch cut between the hosts and the layers within each, and with the layers cut
    over both."""
    found = train(two, "--meshes", "2x2,1x4")
    assert found["transports"] == ["tcp"]
    assert found["there"] == found["here"]


@pytest.mark.full
def test_training_over_a_slow_and_lossy_link(fragile: Cluster) -> None:
    fragile.network.lengthen(fragile.hosts[0], delay=0.002, loss=0.002)
    found = train(fragile, "--steps", "1")
    assert found["there"] == found["here"]


@pytest.mark.full
def test_four_hosts(four_hosts: Network, tmp_path: Path) -> None:
    with cluster(four_hosts, tmp_path) as four:
        found = train(four, "--meshes", "4x1")
    assert found["there"] == found["here"]


def sums(mesh: MeshSpec, dims: list[str] | None = None) -> Building:
    build = Building(mesh, "sums")
    x = build.input(each(mesh, (mesh.workers, 8)))
    total = build.call("getitem", build.call("all_reduce", [x], dims or list(mesh.names), "sum"), 0)
    build.output(total, whole((1, 8)))
    return build


def attached(made: Cluster, timeout: float | None = 6.0) -> HostMesh:
    return monarch.hosts(
        made.addresses,
        tls=made.tls,
        token=made.token,
        trusted_network=made.token is not None,
        transports=["tcp"],
        timeout=timeout,
    )


def fails(hosts: HostMesh, act: object, collectives: str = "monarch") -> str:
    """What is raised where `act` strikes while a step is under way, by everything that comes after it."""
    mesh = MeshSpec.of(w=4)
    executor = hosts.start(mesh)
    plan = replace(sums(mesh).plan(), options=CompileOptions(collectives=collectives))
    (out,) = executor.run(plan, [torch.ones(4, 8)])
    assert executor.shards(out)[0].tolist() == [[4.0] * 8]
    act(executor)  # type: ignore[operator]
    texts = []
    with pytest.raises(DeviceMeshError) as raised:
        while True:
            (last,) = executor.run(plan, [torch.ones(4, 8)])
            executor.wait(last)
    texts.append(str(raised.value))
    for _ in range(2):
        with pytest.raises(DeviceMeshError) as raised:
            executor.wait(*executor.run(plan, [torch.ones(4, 8)]))
        texts.append(str(raised.value))
    executor.wait(out)  # what was done stays done
    executor.close()
    assert len(set(texts)) == 1
    return texts[0]


def test_a_cut_cable_ends_every_wait(fragile: Cluster) -> None:
    with attached(fragile) as hosts:
        text = fails(hosts, lambda _: fragile.network.cut(fragile.hosts[1]))
    assert "the mesh mesh<w=4> has lost" in text and fragile.hosts[1].address in text


class Waits(Actor):
    @endpoint
    def wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)


def test_a_link_that_was_down_for_a_while_ends_nothing(fragile: Cluster) -> None:
    """For 8 s, with a step, a control message and a call under way."""
    with attached(fragile, timeout=None) as hosts, monarch.Mesh(w=4, hosts=hosts) as mesh:
        x = monarch.distribute(torch.arange(8.0), mesh, ["w"])
        waits = hosts.slice(hosts=1).spawn_procs().spawn("waits", Waits)
        assert x.sum().item() == 28
        waits.wait.call_one(0).get(30)
        fragile.network.cut(fragile.hosts[1])
        total, call = x.sum(), waits.wait.call_one(0)
        mesh.flush()
        with pytest.raises(TimeoutError):
            call.get(timeout=8)
        fragile.network.mend(fragile.hosts[1])
        assert total.item() == 28
        call.get(60)
        assert (x * 2).sum().item() == 56


def test_a_worker_that_is_killed_is_named(two: Cluster) -> None:
    with attached(two) as hosts:
        text = fails(hosts, lambda executor: os.kill(executor.worker_pids()[3], signal.SIGKILL))
        assert f"worker 3 on host {two.addresses[1]} was killed by SIGKILL" in text.replace("w=3", "3")
        # The hosts are as good as ever.
        with monarch.Mesh(w=4, hosts=hosts) as mesh:
            x = monarch.distribute(torch.arange(8.0), mesh, ["w"])
            assert x.sum().item() == 28


def test_an_agent_that_is_killed_takes_its_workers_along(fragile: Cluster) -> None:
    pids: list[int] = []

    def strike(executor: object) -> None:
        pids.extend(executor.worker_pids())  # type: ignore[attr-defined]
        fragile.agents[1].end()

    with attached(fragile) as hosts:
        text = fails(hosts, strike)
    assert fragile.hosts[1].address in text
    for pid in pids[2:]:
        with pytest.raises(ProcessLookupError):
            while True:
                os.kill(pid, 0)


def test_a_controller_that_is_killed_leaves_nothing_behind(two: Cluster) -> None:
    script = (
        "import sys, signal, torch, monarch\n"
        f"hosts = monarch.hosts({two.addresses!r}, tls={str(two.tls)!r}, transports=['tcp'])\n"
        "mesh = monarch.Mesh(w=4, hosts=hosts)\n"
        "print(*mesh.executor.worker_pids(), flush=True)\n"
        "signal.pause()\n"
    )
    controller = python.Popen("-c", script, stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 4
    controller.kill()
    controller.wait()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            while True:
                os.kill(pid, 0)


def test_what_cannot_be_started_says_why(two: Cluster) -> None:
    with attached(two) as hosts:
        with pytest.raises(MonarchError, match=r"mesh<w=3> has 3 workers, which cannot be divided evenly over 2 hosts"):
            hosts.start(MeshSpec.of(w=3))
        with pytest.raises(
            MonarchError, match=rf"cannot start mesh<w=1000> on host {two.hosts[0].address[:-1]}.*500 workers"
        ):
            hosts.start(MeshSpec.of(w=1000))
        with Mesh(shape=(2, 2), mesh_dim_names=("hosts", "gpus"), hosts=hosts) as mesh:
            assert monarch.distribute(torch.ones(4), mesh, [["hosts", "gpus"]]).sum().item() == 4
