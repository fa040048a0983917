"""A Ray cluster of two nodes on this machine, over loopback, and the launchers that every test is made for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import monarch.launch
from monarch.language import HostMesh

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
START_SECONDS = "120"

Launch = Callable[..., HostMesh]


@contextmanager
def cluster() -> Iterator[str]:
    """Gives its address. It is started by a process of its own: what Ray forks there runs nothing of what this one has
    loaded."""
    command, pipe = [sys.executable, "-c", CLUSTER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("cluster at "):
                    yield line.removeprefix("cluster at ").strip()
                    return
            raise AssertionError(f"Ray's cluster has not started: {lines}")
        finally:
            process.stdin.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray, connected to the cluster. Nothing is reported to anybody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_gcs_server_port_wait_time_s", START_SECONDS)
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
        with cluster() as address:
            ray.init(address=address, _node_ip_address=HEAD, log_to_driver=False, logging_level="ERROR")
            try:
                yield ray
            finally:
                ray.shutdown()


@pytest.fixture(params=["local", "ray"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """Launches so many hosts."""
    if request.param == "local":
        return monarch.launch.local
    request.getfixturevalue("ray_cluster")
    return monarch.launch.ray
