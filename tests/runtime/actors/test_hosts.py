"""Actors on several hosts: two `monarch host` processes on this machine, whose actors meet over TCP."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
from pathlib import Path
from time import monotonic

import pytest
import torch

import monarch
from monarch import MonarchError
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    HostMesh,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    get_or_spawn_controller,
    this_host,
)
from monarch.distributed import Mesh
from monarch.rdma import RDMABuffer
from monarch.runtime.actors.debugging.console import Console
from monarch.runtime.actors.debugging.debugger import desk
from monarch.runtime.actors.messages.address import name_of, port_of
from monarch.runtime.actors.processes import current
from monarch.runtime.transport.greeting import drive
from monarch.runtime.transport.handshake import HandshakeFailed, prove
from monarch.runtime.transport.streams import Stream
from tests import python
from tests.runtime.actors.agents import TOKEN, Hosts, hosts_here
from tests.runtime.actors.conftest import WAIT
from tests.runtime.actors.test_debugger import Trainer, shown
from tests.runtime.actors.test_hearing import Apart, Asking
from tests.runtime.actors.test_router import Trap


class Peer(Actor):
    """Says where it is, keeps what it is told, and asks others."""

    def __init__(self) -> None:
        self.told: list[int] = []

    @endpoint
    def where(self) -> tuple[dict[str, int], str, int]:
        return dict(current_rank()), current.process().address, os.getpid()

    @endpoint
    def tell(self, number: int) -> None:
        self.told.append(number)

    @endpoint
    def heard(self) -> list[int]:
        return self.told

    @endpoint
    def ask(self, other: Peer) -> tuple[str, bool]:
        """Where another actor is, and whether this process has a connection with that one."""
        _, address, _ = other.where.call_one().get(WAIT)
        return address, address in current.process().router.network.peers

    @endpoint
    def answer(self, port: Port[int], number: int) -> None:
        port.send(number + 1)

    @endpoint
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    def wait(self) -> None:
        signal.pause()


def pair(hosts: HostMesh) -> tuple[ProcMesh, Peer, Peer, Peer]:
    """A process on each host, an actor in each, and the two by themselves."""
    procs = hosts.spawn_procs(name="procs")
    peers = procs.spawn("peer", Peer)
    return procs, peers, peers.slice(hosts=0), peers.slice(hosts=1)  # type: ignore[attr-defined]


def test_meshes_have_the_dim_hosts(hosts: HostMesh) -> None:
    assert dict(hosts.extent) == {"hosts": 2}
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    peers = procs.spawn("peer", Peer)
    found = peers.where.call().get(WAIT)
    assert dict(found.extent) == {"hosts": 2, "gpus": 2}
    assert [place for place, _, _ in found.values()] == [dict(point) for point, _ in found.items()]
    where = [port_of(address) for _, address, _ in found.values()]
    assert where[0] == where[1] != where[2] == where[3]
    assert procs.host_mesh.extent == hosts.extent
    assert procs.slice(hosts=1).host_mesh.size() == 1
    (second,) = hosts.slice(hosts=1).spawn_procs().spawn("peer", Peer).where.call().get(WAIT).values()
    assert port_of(second[1]) == where[2]
    with pytest.raises(ValueError, match="'hosts' counts the hosts"):
        hosts.spawn_procs(per_host={"hosts": 2})
    procs.stop().get(WAIT)


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_of_the_environment_only_what_is_named_goes_to_other_hosts(
    hosts: HostMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_TEST_SECRET", "secret")
    monkeypatch.setenv("MONARCH_TEST_NAMED", "named")
    assert b"secret" not in pickle.dumps(hosts.spawn_procs()._group.environ)
    with monarch.config.configured(environment="MONARCH_TEST_NAMED, MONARCH_TEST_MISSING"):
        procs = hosts.spawn_procs()
    assert procs._group.environ == (("MONARCH_TEST_NAMED", "named"),)
    with procs.activate():
        read = monarch.remote(variables)
        found = read.call("MONARCH_TEST_NAMED", "MONARCH_TEST_SECRET", "PATH").get(WAIT).values()
    assert [each[:2] for each in found] == [["named", None]] * 2
    assert all(path for _, _, path in found)


def test_actors_of_two_hosts_meet_without_the_root(hosts: HostMesh) -> None:
    _, _, one, other = pair(hosts)
    for asks, asked in ((one, other), (other, one)):
        _, address, _ = asked.where.call_one().get(WAIT)
        assert asks.ask.call_one(asked).get(WAIT) == (address, True)


def test_actors_of_the_programs_host_meet_them_too(hosts: HostMesh) -> None:
    _, _, one, _ = pair(hosts)
    here = this_host().spawn_procs().spawn("here", Peer)
    for asks, asked in ((one, here), (here, one)):
        _, address, _ = asked.where.call_one().get(WAIT)
        assert asks.ask.call_one(asked).get(WAIT) == (address, False)  # by way of the root


def test_messages_come_in_the_order_sent(hosts: HostMesh) -> None:
    _, peers, one, _ = pair(hosts)
    for number in range(2000):
        (peers if number % 2 else one).tell.broadcast(number)
    assert one.heard.call_one().get(WAIT) == list(range(2000))


def test_tensors_and_ports_arrive(hosts: HostMesh) -> None:
    _, _, one, _ = pair(hosts)
    x = torch.arange(4 << 20, dtype=torch.float32)  # 16 MiB
    for _ in range(3):
        back = one.double.call_one(x).get(WAIT)
        assert torch.equal(back, 2 * x)
    back += 1  # it is the receiver's own
    port, receiver = Channel[int].open()
    one.answer.broadcast(port, 6)
    assert receiver.recv().get(WAIT) == 7


class Keeper(Actor):
    def __init__(self) -> None:
        self.memory = torch.arange(8.0)
        self.buffer = RDMABuffer(self.memory)

    @endpoint
    def lend(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    def content(self) -> list[float]:
        return self.memory.tolist()

    @endpoint
    def double(self, buffer: RDMABuffer) -> None:
        here = torch.zeros(8)
        buffer.read_into(here).get(WAIT)
        buffer.write_from(2 * here).get(WAIT)


def test_rdma_buffers_are_used_on_the_other_host(hosts: HostMesh) -> None:
    keepers = hosts.spawn_procs().spawn("keeper", Keeper)
    one, other = keepers.slice(hosts=0), keepers.slice(hosts=1)  # type: ignore[attr-defined]
    other.double.call_one(one.lend.call_one().get(WAIT)).get(WAIT)
    assert one.content.call_one().get(WAIT) == [2.0 * n for n in range(8)]


class Service(Actor):
    @endpoint
    def process(self) -> str:
        return current.process().address


class Client(Actor):
    @endpoint
    def find(self) -> Service:
        return get_or_spawn_controller("service", Service).get(WAIT)


def test_there_is_one_controller_for_all_hosts(hosts: HostMesh) -> None:
    clients = hosts.spawn_procs().spawn("client", Client)
    services = {service.process.call_one().get(WAIT) for service in clients.find.call().get(WAIT).values()}
    assert services == {current.process().address}


def test_breakpoints_on_all_hosts_come_to_one_console(hosts: HostMesh) -> None:
    trainers = hosts.spawn_procs().spawn("trainer", Trainer)
    replies = trainers.step.call(21)
    at = desk().get(WAIT)
    at.wait.call_one(2).get(WAIT)
    user = Console(at)
    assert [line[:19] for line in shown(user, "list").splitlines()] == ["trainer 0  hosts=0 ", "trainer 1  hosts=1 "]
    shown(user, "attach trainer 1")
    shown(user, "loss = 100")
    shown(user, "detach")
    assert shown(user, "continue") == "2 went on\n"
    assert replies.get(WAIT).values() == [43, 101]


@monarch.remote
def rank() -> int:
    return current_rank().rank


def test_functions_run_on_all_hosts(hosts: HostMesh) -> None:
    with hosts.spawn_procs(per_host={"gpus": 2}).activate():
        assert rank.call().get(WAIT).values() == [0, 1, 2, 3]


def settings_of(name: str) -> object:
    return monarch.config.get_global_config()[name]


def test_settings_reach_processes_on_all_hosts(hosts: HostMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    with monarch.config.configured(kernels="all", token="other"):
        procs = hosts.spawn_procs()
    with procs.activate():
        for name, value in (("kernels", "all"), ("templates", "off"), ("token", None)):
            assert monarch.remote(settings_of).call(name).get(WAIT).values() == [value, value]


def test_programs_run_on_the_same_hosts(two: Hosts) -> None:
    with monarch.hosts(two.addresses, token=TOKEN) as attached:
        _, peers, one, _ = pair(attached)
        with Mesh(shape=(2,), mesh_dim_names=("hosts",), hosts=attached) as mesh:
            x = monarch.distribute(torch.arange(4.0), mesh, ["hosts"])
            assert x.sum().item() == 6
            assert one.double.call_one(torch.ones(2)).get(WAIT).tolist() == [2, 2]
        assert one.heard.call_one().get(WAIT) == []
        peers.stop().get(WAIT)


class Caller(Actor):
    """What has got a mesh of hosts in a message."""

    @endpoint
    def spawn_on(self, hosts: HostMesh) -> tuple[tuple[str, ...], str]:
        peer: Peer = hosts.spawn_procs().spawn("peer", Peer)
        return hosts.addresses, peer.where.call_one().get(WAIT)[1]

    @endpoint
    def start_on(self, hosts: HostMesh) -> None:
        Mesh(data=1, hosts=hosts).executor  # noqa: B018


def test_there_is_one_host_mesh(two: Hosts) -> None:
    """Attached hosts run programs and spawn processes; slices and references spawn processes, and refuse programs."""
    assert monarch.HostMesh is HostMesh and monarch.this_host is this_host
    with monarch.hosts(two.addresses, token=TOKEN) as hosts:
        assert repr(hosts) == f"HostMesh({{'hosts': 2}}: {', '.join(two.addresses)})"
        second = hosts.slice(hosts=-1)
        assert second.addresses == (two.addresses[1],) and repr(second) == f"HostMesh({two.addresses[1]})"
        assert [line.split()[-1] for line in hosts.to_table().splitlines()] == ["value", *two.addresses]
        with pytest.raises(MonarchError, match="a part of 2 attached hosts"):
            Mesh(data=2, hosts=second).executor  # noqa: B018
        with pytest.raises(MonarchError, match="a part of 2 hosts: close the whole"):
            second.close()
        with Mesh(data=2, hosts=hosts.rename(hosts="nodes")) as mesh:
            assert monarch.distribute(torch.arange(4.0), mesh, "[@data]").sum().item() == 6
        caller = this_host().spawn_procs().spawn("caller", Caller)
        reached, place = caller.spawn_on.call_one(second).get(WAIT)
        assert reached == (f"127.0.0.1:{port_of(place)[1]}",)
        with pytest.raises(ActorError, match="this process did not attach these hosts"):
            caller.start_on.call_one(second).get(WAIT)


def test_what_they_print_is_printed_here(hosts: HostMesh, capfd: pytest.CaptureFixture[str]) -> None:
    procs, peers, _, _ = pair(hosts)
    peers.say.call("good morning").get(WAIT)
    procs.stop().get(WAIT)
    this_host().spawn_procs().stop().get(WAIT)
    out = capfd.readouterr().out.splitlines()
    assert sorted(line for line in out if "good" in line) == [
        f"[procs hosts={number}] good morning" for number in range(2)
    ]


def test_kill_9_there_is_a_failure_with_status_and_last_lines(
    hosts: HostMesh, faults: queue.SimpleQueue[MeshFailure]
) -> None:
    _, peers, one, other = pair(hosts)
    other.say.call_one("my last words").get(WAIT)
    _, _, pid = other.where.call_one().get(WAIT)
    waiting = other.wait.call_one()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError, match=r"procs\[1\] was killed by SIGKILL"):
        waiting.get(WAIT)
    failure = faults.get(timeout=WAIT)
    assert failure.is_of(peers) and failure.rank == 1
    assert failure.status == -signal.SIGKILL and failure.log == ("my last words",)
    with pytest.raises(SupervisionError, match="was killed by SIGKILL"):
        other.where.call_one().get(WAIT)
    assert one.heard.call_one().get(WAIT) == []


class Owner(Actor):
    """Has processes on all hosts."""

    @endpoint
    def spawn(self, hosts: HostMesh) -> Peer:
        self.peers = hosts.spawn_procs(name="owned").spawn("peer", Peer)
        return self.peers


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_owned_from_another_host_ends_with_its_owner(
    hosts: HostMesh, killed: bool, faults: queue.SimpleQueue[MeshFailure]
) -> None:
    procs = hosts.slice(hosts=0).spawn_procs(name="owners")
    peers = procs.spawn("owner", Owner).spawn.call_one(hosts).get(WAIT)
    places = peers.where.call().get(WAIT).values()
    if killed:
        (owner,) = procs._addresses
        assert owner not in [address for _, address, _ in places]
        os.kill(procs.spawn("peer", Peer).where.call_one().get(WAIT)[2], signal.SIGKILL)
        assert "SIGKILL" in faults.get(timeout=WAIT).reason and "SIGKILL" in faults.get(timeout=WAIT).reason
    else:
        procs.stop().get(WAIT)
    for _, _, pid in places:
        gone(pid)


class Guardian(Owner):
    """Deals with failures of what it owns, and can cut this process off from where that lives."""

    def __init__(self, failures: Port[MeshFailure]) -> None:
        self.failures = failures

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.send(failure)
        return True

    @endpoint
    def cut(self, address: str) -> None:
        network = current.process().router.network
        (link,) = network.links[address]
        assert link.stream is not None
        link.stream.shutdown()


def test_what_is_owned_from_another_host_is_lost_with_the_connection(hosts: HostMesh) -> None:
    """Both hosts live, and the program reaches both processes."""
    port, failures = Channel[MeshFailure].open()
    guardian = hosts.slice(hosts=0).spawn_procs(name="owners").spawn("guardian", Guardian, port)
    peers = guardian.spawn.call_one(hosts.slice(hosts=1)).get(WAIT)
    ((_, address, pid),) = peers.where.call().get(WAIT).values()
    guardian.cut.call_one(address).get(WAIT)
    assert failures.recv().get(WAIT).is_of(peers)
    gone(pid)


def gone(pid: int) -> None:
    """Wait for a process' end, which comes within the test's time."""
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, 0)


def test_a_host_that_is_lost_ends_what_runs_there(tmp_path: Path, faults: queue.SimpleQueue[MeshFailure]) -> None:
    with hosts_here(2, tmp_path) as two, monarch.hosts(two.addresses, token=TOKEN) as attached:
        _, peers, one, other = pair(attached)
        _, _, pid = other.where.call_one().get(WAIT)
        waiting = other.wait.call_one()
        two.running[1].kill()
        with pytest.raises(SupervisionError, match=two.addresses[1]):
            waiting.get(WAIT)
        failure = faults.get(timeout=WAIT)
        assert failure.is_of(peers) and failure.rank == 1 and two.addresses[1] in failure.reason
        gone(pid)
        assert one.heard.call_one().get(WAIT) == []
        with pytest.raises(SupervisionError, match="is lost"):
            other.where.call_one().get(WAIT)


def test_detaching_hosts_ends_their_processes_and_is_no_failure(two: Hosts) -> None:
    with monarch.hosts(two.addresses, token=TOKEN) as attached:
        _, peers, one, _ = pair(attached)
        pids = [pid for _, _, pid in peers.where.call().get(WAIT).values()]
        waiting = one.wait.call_one()
    with pytest.raises(SupervisionError, match="its host was detached"):
        waiting.get(WAIT)
    for pid in pids:
        gone(pid)


@pytest.mark.parametrize("knows", ["nothing", "a process", "how to begin"])
def test_a_stranger_gets_nowhere(hosts: HostMesh, knows: str, tmp_path: Path) -> None:
    _, _, one, _ = pair(hosts)
    _, address, _ = one.where.call_one().get(WAIT)
    name = "ab" * 16 if knows == "nothing" else name_of(address)
    packet = pickle.dumps((("head",), Trap(tmp_path / "unpickled"), ()))
    with socket.create_connection(port_of(address), WAIT) as stranger:
        stranger.sendall(b"actors 1" + bytes.fromhex(name))
        if knows == "how to begin":
            with pytest.raises((HandshakeFailed, ConnectionError)):
                drive(prove(b"a guess" * 5, "cd" * 16, name), Stream(stranger), monotonic() + WAIT, None)
        else:
            stranger.sendall(len(packet).to_bytes(4, "big") + packet * 10)
            assert ended(stranger)
    assert not (tmp_path / "unpickled").exists()
    assert one.heard.call_one().get(WAIT) == []


def ended(stranger: socket.socket) -> bool:
    """Whether the other end has closed the connection without a word, once it has."""
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


ROOT = """
import sys, signal
import monarch
from monarch.actor import HostMesh, this_host
from tests.runtime.actors.test_hosts import Peer, TOKEN
hosts = monarch.hosts(sys.argv[1:], token=TOKEN)
peers = hosts.spawn_procs(per_host={"gpus": 2}).spawn("peer", Peer)
print(*[pid for _, _, pid in peers.where.call().get().values()], flush=True)
signal.pause()
"""


def test_nothing_is_left_when_the_root_is_killed(two: Hosts, hosts: HostMesh) -> None:
    _, _, one, _ = pair(hosts)  # another program's, here: this one
    root = python.Popen("-c", ROOT, *two.addresses, stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    pids = [int(pid) for pid in root.stdout.readline().split()]
    assert len(pids) == 4
    root.kill()
    root.communicate()
    for pid in pids:
        gone(pid)
    assert one.heard.call_one().get(WAIT) == []


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_an_owner_on_another_host_is_told_before_the_caller_is_answered(hosts: HostMesh, how: str) -> None:
    """The caller is beside what ends, and the owner is not."""
    procs = hosts.spawn_procs()
    owner, asking = procs.slice(hosts=0).spawn("apart", Apart), procs.slice(hosts=1).spawn("asking", Asking)
    for count in (1, 2):
        ending = owner.spawn_on.call_one(hosts.slice(hosts=count - 1)).get(WAIT)
        assert asking.ask.call_one(ending, owner, how).get(WAIT) == count
    procs.stop().get(WAIT)
