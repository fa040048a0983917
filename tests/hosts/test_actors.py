"""Actors on hosts that are network namespaces, with TLS between all of them."""

from __future__ import annotations

import os
import queue
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import monarch
from monarch.actor import Actor, HostMesh, MeshFailure, SupervisionError, endpoint
from monarch.compiler.plan import MonarchError
from monarch.distributed import Mesh
from monarch.rdma import RDMABuffer
from monarch.runtime.actors.messages.address import name_of, port_of
from monarch.spmd import setup_torch_elastic_env
from tests.hosts.cluster import Cluster, cluster
from tests.hosts.network import Network, network
from tests.runtime.actors.conftest import WAIT, _no_faults, faults
from tests.runtime.actors.services import Service, values
from tests.runtime.actors.test_hosts import Keeper, gone, pair

__all__ = ["_no_faults", "faults"]


@pytest.fixture(scope="module")
def two(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts for all tests that leave them as they were."""
    with network(2) as made, cluster(made, tmp_path_factory.mktemp("two")) as two:
        yield two


@pytest.fixture
def hosts(two: Cluster) -> Iterator[HostMesh]:
    RDMABuffer(torch.zeros(1)).drop().get(WAIT)  # this process' endpoint is there before
    with monarch.hosts(two.addresses, tls=two.tls) as attached:
        yield attached


def test_calls_go_to_and_between_hosts(two: Cluster, hosts: HostMesh) -> None:
    _, peers, one, other = pair(hosts)
    found = [port_of(address)[0] for _, address, _ in peers.where.call().get(WAIT).values()]
    assert found == [host.address for host in two.hosts]
    _, address, _ = other.where.call_one().get(WAIT)
    assert one.ask.call_one(other).get(WAIT) == (address, True)
    for number in range(500):
        (peers if number % 2 else other).tell.broadcast(number)
    assert other.heard.call_one().get(WAIT) == list(range(500))


def test_tensors_and_rdma_buffers(hosts: HostMesh) -> None:
    procs, _, one, _ = pair(hosts)
    x = torch.arange(4 << 20, dtype=torch.float32)  # 16 MiB
    assert torch.equal(one.double.call_one(x).get(WAIT), 2 * x)
    keepers = procs.spawn("keeper", Keeper)
    lender, user = keepers.slice(hosts=0), keepers.slice(hosts=1)  # type: ignore[attr-defined]
    buffer = lender.lend.call_one().get(WAIT)
    user.double.call_one(buffer).get(WAIT)
    here = torch.zeros(8)
    buffer.read_into(here).get(WAIT)
    assert here.tolist() == lender.content.call_one().get(WAIT) == [2.0 * n for n in range(8)]


class Summer(Actor):
    @endpoint
    def total(self) -> float:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # by name it would be the loopback, for both have one name
        torch.distributed.init_process_group("gloo")
        mine = torch.tensor(10.0 ** torch.distributed.get_rank())
        torch.distributed.all_reduce(mine)
        torch.distributed.destroy_process_group()
        return mine.item()


def test_torch_distributed_over_hosts(hosts: HostMesh) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    setup_torch_elastic_env(procs)
    assert procs.spawn("summer", Summer).total.call().get(WAIT).values() == [11.0, 11.0]


def test_who_has_no_certificate_gets_nowhere(two: Cluster, hosts: HostMesh) -> None:
    _, _, one, _ = pair(hosts)
    _, address, _ = one.where.call_one().get(WAIT)
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(port_of(address), WAIT) as stranger:
        stranger.sendall(b"actors 1" + bytes.fromhex(name_of(address)))
        with pytest.raises((ssl.SSLError, ConnectionError)), anyone.wrap_socket(stranger) as wrapped:
            wrapped.sendall(b"x" * 80)
            if not wrapped.recv(1):
                raise ConnectionResetError


def test_a_cut_cable_ends_calls(two_hosts: Network, tmp_path: Path, faults: queue.SimpleQueue[MeshFailure]) -> None:
    with (
        cluster(two_hosts, tmp_path) as fragile,
        monarch.hosts(fragile.addresses, tls=fragile.tls, timeout=6.0) as attached,
    ):
        _, peers, one, other = pair(attached)
        pids = [pid for _, _, pid in peers.where.call().get(WAIT).values()]
        waiting = [other.wait.call_one(), one.ask.call_one(other)]
        fragile.network.cut(fragile.hosts[1])
        for each in waiting:
            with pytest.raises((SupervisionError, MonarchError), match=fragile.hosts[1].address):
                each.get(WAIT)
        failure = faults.get(timeout=WAIT)
        assert failure.is_of(peers) and failure.rank == 1 and fragile.hosts[1].address in failure.reason
        gone(pids[1])  # its host has noticed, too
        assert one.heard.call_one().get(WAIT) == []


def test_programs_run_beside_them(hosts: HostMesh) -> None:
    """Their workers speak TLS to each other, in the actors' processes."""
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    service = procs.spawn("service", Service)
    with Mesh(procs=procs) as mesh:
        x = mesh.from_shards(service.make.shards(2, 3), "[@(hosts,gpus), -]")
        whole = x.full_tensor()
        assert torch.equal((x.T @ x).full_tensor(), whole.T @ whole)
        for rank, shard in enumerate(values(service.get.call(x * 2))):
            assert torch.equal(shard, torch.full((2, 3), 2.0 * rank))
