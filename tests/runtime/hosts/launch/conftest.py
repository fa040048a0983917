"""A Ray cluster of two nodes on this machine, over loopback, and the launchers that every test is made for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import monarch.launch
from monarch import HostMesh

HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the machine's address in the network
CLUSTER = f"""
import sys
from ray.cluster_utils import Cluster
node = dict(num_cpus=2, object_store_memory=80_000_000, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(node, node_ip_address={HEAD!r}))
try:
    cluster.add_node(**node, node_ip_address={OTHER!r})
    print("cluster at", cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""
START_SECONDS = 40
TRIES = 3  # now and then the first of Ray's processes ends, or hangs, before it has written a word

Launch = Callable[..., HostMesh]


def start_cluster() -> tuple[subprocess.Popen[str], str]:
    """A process that has started a cluster, and the cluster's address. What Ray forks there runs nothing of what this
    process has loaded."""
    said = []
    for _ in range(TRIES):
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("cluster at "):
                return process, line.removeprefix("cluster at ").strip()
            said.append(line)
        process.wait()
    raise AssertionError(f"Ray's cluster does not start: {said}")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray, connected to the cluster. Nothing is reported to anybody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_gcs_server_port_wait_time_s", str(START_SECONDS))
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
        process, address = start_cluster()
        with process:  # which ends when there is nothing more to be read
            ray.init(address=address, _node_ip_address=HEAD, log_to_driver=False, logging_level="ERROR")
            try:
                yield ray
            finally:
                ray.shutdown()


# Of launches on Ray, `make test` has those of test_ray.py.
@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.full)])
def launch(request: pytest.FixtureRequest) -> Launch:
    """Launches so many hosts."""
    if request.param == "local":
        return monarch.launch.local
    request.getfixturevalue("ray_cluster")
    return monarch.launch.ray
