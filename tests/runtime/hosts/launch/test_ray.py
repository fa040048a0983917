"""What is Ray's: nodes, resources, actors, and errors where there are none."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import monarch.launch
from monarch import MeshSpec, MonarchError
from monarch.runtime.hosts.launch.on_ray import RayLauncher
from tests.runtime.hosts.launch.conftest import HEAD, OTHER
from tests.runtime.hosts.launch.test_launchers import has_ended, launched, pids, watched


def launcher_of(hosts: monarch.HostMesh) -> RayLauncher:
    launcher = launched(hosts).launcher
    assert isinstance(launcher, RayLauncher)
    return launcher


@pytest.mark.full
def test_hosts_are_on_nodes_of_their_own_and_give_back_what_they_held(ray_cluster: Any) -> None:
    with monarch.launch.ray(nodes=2, cpus_per_node=2) as hosts:
        assert "CPU" not in ray_cluster.available_resources()
        group = ray_cluster.util.placement_group_table(launcher_of(hosts).group)
        assert (group["strategy"], group["state"]) == ("STRICT_SPREAD", "CREATED")
        assert len(set(group["bundles_to_node_id"].values())) == 2
        assert {address.rpartition(":")[0] for address in hosts.addresses} == {HEAD, OTHER}
    again = monarch.launch.ray(nodes=2, cpus_per_node=2)  # which needs all of what the first held
    again.close()


def test_an_actor_that_is_killed_takes_its_agent_with_it(ray_cluster: Any) -> None:
    with monarch.launch.ray(nodes=2) as hosts, watched(pids(hosts)) as agents:
        launcher = launcher_of(hosts)
        ray_cluster.kill(launcher.actors[1])
        assert has_ended(agents[1])
        ray_cluster.wait(list(launcher.waiting), timeout=60)
        ((number, how),) = launcher.ended().items()
        assert number == 1 and "Ray actor ended" in how and "killed" in how
        with pytest.raises(MonarchError, match="host 1 .* is gone: its Ray actor ended"):
            launched(hosts).start(MeshSpec((("data", 2),)))


def test_too_few_nodes(ray_cluster: Any) -> None:
    """Three would find enough CPUs, and no third node."""
    with pytest.raises(MonarchError) as error:
        monarch.launch.ray(nodes=3, timeout=0.5)
    assert error.value.message == "Ray has not found 3 nodes with 1 CPU free on each within 0.5 s"
    first, *nodes, free = error.value.hint.splitlines()
    assert (first, sorted(nodes)) == ("its nodes are", [f"{HEAD}: 2 CPU", f"{OTHER}: 2 CPU"])
    assert free.startswith("free in all: ")


def test_nodes_that_are_too_small(ray_cluster: Any) -> None:
    with pytest.raises(MonarchError, match="2 nodes with 1 CPU, 8 GPU free on each"):
        monarch.launch.ray(nodes=2, gpus_per_node=8, timeout=0.5)


def test_no_cluster(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str) -> None:
        raise ConnectionError(f"Could not find any running Ray instance ({address})")

    monkeypatch.setattr(ray_cluster, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster, "init", init)
    with pytest.raises(MonarchError, match=r"no Ray cluster is found from here: Could not find(?s:.*)ray start --head"):
        monarch.launch.ray(nodes=2)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MonarchError, match=r"Ray cannot be imported(?s:.*)pip install ray"):
        monarch.launch.ray(nodes=2)
