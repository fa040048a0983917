"""People who connect to a host and say nothing: what runs there goes on, and more can be started."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import monarch
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import Mesh
from monarch.runtime.actors.messages.address import port_of
from tests.runtime.actors.agents import TOKEN, hosts_here

DESCRIPTORS = 1024
STRANGERS = 1100
WAIT = 30.0


class Adder(Actor):
    @endpoint
    def add(self, n: int) -> int:
        return n + current_rank().rank


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open as many files as the test connects."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 4 * STRANGERS:
        pytest.skip(f"this process may open {before[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * STRANGERS, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_silent_connections_end_nothing(many_files: None, tmp_path: Path) -> None:
    limited = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$0" "$@"')
    with (
        hosts_here(1, tmp_path, limited) as one,
        monarch.hosts(one.addresses, token=TOKEN) as hosts,
        ExitStack() as end,
    ):
        mesh = end.enter_context(Mesh(w=2, hosts=hosts))
        x = monarch.distribute(torch.arange(4.0), mesh, ["w"])
        actors = hosts.spawn_procs(per_host={"p": 2}).spawn("adder", Adder)
        assert actors.add.call(1).get(WAIT).values() == [1, 2]
        (agent,) = hosts._agents
        ports = [int(one.addresses[0].rpartition(":")[2]), int((port_of(agent) or ("", 0))[1])]
        for port in ports:
            for _ in range(STRANGERS):
                stranger = end.enter_context(socket.socket())
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port))
        assert x.sum().item() == 6
        assert actors.add.call(2).get(WAIT).values() == [2, 3]
        with Mesh(v=2, hosts=hosts) as other:  # needs descriptors and forks
            assert monarch.distribute(torch.ones(2), other, ["v"]).sum().item() == 2
        more = hosts.spawn_procs().spawn("more", Adder)
        assert more.add.call_one(7).get(WAIT) == 7
        assert x.sum().item() == 6
