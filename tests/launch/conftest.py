"""A Ray cluster of two nodes on this machine, over loopback, and the launchers that every test is made for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import monarch.launch
from monarch.language import HostMesh

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the machine's address in the network

Launch = Callable[..., HostMesh]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray, connected to the cluster. Nothing is reported to anybody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "node_ip_address": HEAD})
        try:
            cluster.add_node(**NODE, node_ip_address=OTHER)
            ray.init(address=cluster.address, _node_ip_address=HEAD, log_to_driver=False, logging_level="ERROR")
            yield ray
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(params=["local", "ray"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """Launches so many hosts."""
    if request.param == "local":
        return monarch.launch.local
    request.getfixturevalue("ray_cluster")
    return monarch.launch.ray
