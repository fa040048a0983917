"""Process groups between hosts that are network namespaces: where the network is trusted, and no wait without end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from monarch.compiler.plan import DeviceMeshError, MeshSpec
from monarch.compiler.plan.options import CompileOptions
from tests.hosts.cluster import Cluster, cluster
from tests.hosts.network import Network, network
from tests.hosts.test_meshes import attached, fails, sums, train


@pytest.fixture(scope="module")
def trusting(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with network(2) as made, cluster(made, tmp_path_factory.mktemp("two"), trusted=True) as two:
        yield two


@pytest.mark.full
def test_training_over_gloo_gives_the_numbers_of_one_host(trusting: Cluster) -> None:
    """To the bit: with the batch cut between the hosts and the layers within each, with the layers cut over both."""
    found = train(trusting, "--meshes", "2x2,1x4", "--collectives", "gloo")
    assert found["there"] == found["here"]


def test_hosts_with_tls_do_not_listen_for_gloo(two_hosts: Network, tmp_path: Path) -> None:
    """Where a group of workers is on both hosts; those on one host have its loopback interface between them."""
    mesh = MeshSpec.of(data=2, model=2)
    plan = replace(sums(mesh).plan(), options=CompileOptions(collectives="gloo"))
    within = sums(mesh, ["model"])
    with cluster(two_hosts, tmp_path) as made, attached(made) as hosts, hosts.start(mesh) as executor:
        (out,) = executor.run(plan, [torch.ones(4, 8)])
        with pytest.raises(DeviceMeshError, match="Gloo does not encrypt, and the hosts have TLS") as info:
            executor.wait(out)
        assert "--trusted-network" in str(info.value)
        (out,) = executor.run(replace(within.plan(), options=CompileOptions(collectives="gloo")), [torch.ones(4, 8)])
        assert executor.shards(out)[0].tolist() == [[2.0] * 8]


def test_a_worker_that_is_killed_is_named(trusting: Cluster) -> None:
    with attached(trusting) as hosts:
        text = fails(hosts, lambda executor: os.kill(executor.worker_pids()[3], signal.SIGKILL), "gloo")
    assert f"worker w=3 on host {trusting.addresses[1]} was killed by SIGKILL" in text


def test_a_cut_cable_ends_every_wait(two_hosts: Network, tmp_path: Path) -> None:
    with cluster(two_hosts, tmp_path, trusted=True) as made, attached(made) as hosts:
        text = fails(hosts, lambda _: made.network.cut(made.hosts[1]), "gloo")
    assert "the mesh mesh<w=4> has lost" in text and made.hosts[1].address in text
