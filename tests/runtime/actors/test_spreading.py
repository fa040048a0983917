"""What goes to several processes of another host crosses to it once, and is spread there; answers come together."""

from __future__ import annotations

import errno
import os
import queue
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import monarch
from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    HostMesh,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    this_host,
)
from monarch.runtime.actors.messages.link import Link
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.protocol import ENDED, REPLIES, REPLY, Head
from monarch.runtime.actors.processes import current, spreading
from tests.runtime.actors.agents import TOKEN, hosts_here
from tests.runtime.actors.conftest import WAIT


class Peer(Actor):
    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.told: list[int] = []
        self.tensor = tensor
        self.go = threading.Event()

    @endpoint
    def tell(self, number: int) -> None:
        self.told.append(number)

    @endpoint
    def heard(self) -> list[int]:
        return self.told

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def total(self) -> float:
        assert self.tensor is not None
        return float(self.tensor.sum())

    @endpoint
    def add(self, x: torch.Tensor) -> float:
        x += current_rank().rank  # it is this actor's own
        return float(x[-1])

    @endpoint
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @endpoint
    def only(self, rank: int) -> int:
        """Raises but there."""
        if current_rank().rank != rank:
            raise ValueError(f"not rank {rank}")
        return rank

    @endpoint
    def hang(self, rank: int) -> int:
        """Never answers there."""
        while current_rank().rank == rank:
            signal.pause()
        return current_rank().rank

    @endpoint
    def tell_all(self, others: Peer, count: int) -> None:
        tell_in_turns(others, count)

    @endpoint
    def ask_all(self, others: Peer, x: torch.Tensor) -> list[float]:
        """To several on another host: small messages between a large one and its answers."""
        answers = others.add.call(x)
        others.tell.broadcast(1)
        for rank in range(2):
            others.slice(gpus=rank).tell.call_one(2 + rank).get(WAIT)  # type: ignore[attr-defined]
        return answers.get(WAIT).values()

    @endpoint
    def ask(self, others: Peer) -> str:
        try:
            return str(others.heard.call().get(WAIT).values())
        except SupervisionError as error:
            return str(error)

    @endpoint
    def hear_of_the_end_first(self, others: Peer, procs: ProcMesh) -> list[int]:
        """Call those of another host, have them end, and take nothing from their agent until one has."""
        process = current.process()
        others.heard.call().get(WAIT)
        (agent,) = process.spreads.sent_through
        (link,) = process.router.network.links[agent]
        stream, ended, held = link.stream, process.handlers[ENDED], []
        assert stream is not None

        def hear(sender: str, head: Head, payload: Payload) -> None:
            ended(sender, head, payload)
            if held:
                process.router.watch(stream.fileno(), held.pop())

        process.handle(ENDED, hear)
        held.append(link.ready)
        process.router.forget(stream.fileno())
        answers = others.pid.call()
        stop = procs.stop()
        found = answers.get(WAIT).values()
        stop.get(WAIT)
        return found

    @endpoint
    def lose_the_last_agent_of(self, others: Peer, rank: int, fan_out: int) -> str:
        """Break the connection to the agent by which one of these answers, and call them."""
        process = current.process()
        spreading.FAN_OUT = fan_out
        others.heard.call().get(WAIT)
        waiting = others.hang.call(rank)
        for link in process.router.network.links[others._agents[-1]]:  # type: ignore[attr-defined]
            link.close()
        try:
            waiting.get(WAIT)
        except SupervisionError as error:
            return str(error)
        return "answered"


def tell_in_turns(peers: Peer, count: int) -> None:
    """Numbers to all of a mesh (hosts=2, gpus=2), some of it, and one, by broadcasts and calls."""
    meshes = [peers, peers.slice(hosts=1), peers.slice(hosts=1, gpus=1), peers]  # type: ignore[attr-defined]
    for number in range(count):
        mesh = meshes[number % 4]
        if number % 3:
            mesh.tell.broadcast(number)
        else:
            mesh.tell.call(number)


def spawn(hosts: HostMesh, tensor: torch.Tensor | None = None) -> Peer:
    return hosts.spawn_procs(per_host={"gpus": 2}).spawn("peer", Peer, tensor)


def heard(peers: Peer, hosts: int, gpus: int) -> list[int]:
    return peers.slice(hosts=hosts, gpus=gpus).heard.call_one().get(WAIT)  # type: ignore[attr-defined]


@pytest.mark.parametrize("sender", ["root", "this host", "attached host"])
def test_messages_come_in_the_order_sent_whichever_way_they_take(hosts: HostMesh, sender: str) -> None:
    peers = spawn(hosts)
    if sender == "root":
        tell_in_turns(peers, 1000)
        assert heard(peers, 1, 1) == list(range(1000))
    else:
        on = hosts.slice(hosts=0) if sender == "attached host" else this_host()
        on.spawn_procs().spawn("sender", Peer).tell_all.call_one(peers, 1000).get(WAIT)
        while len(found := heard(peers, 1, 1)) < 1000:  # another sender's messages may come first
            pass
        assert found == list(range(1000))
    while len(found := heard(peers, 0, 0)) < 500:
        pass
    assert found == [number for number in range(1000) if number % 4 in (0, 3)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of values in each message that this process sends to other hosts."""
    sizes: list[int] = []
    send = Link.send

    def counted(self: Link, head: Head, payload: Payload) -> bool:
        sizes.append(len(payload.data or b"") + sum(payload.sizes))
        return send(self, head, payload)

    monkeypatch.setattr(Link, "send", counted)
    return sizes


def test_a_large_payload_crosses_to_each_host_once(hosts: HostMesh, sent: list[int]) -> None:
    size = 8 << 20
    x = torch.zeros(size // 4)
    peers = spawn(hosts, x)
    assert peers.total.call().get(WAIT).values() == [0.0] * 4
    assert 2 * size <= sum(sent) < 2 * size + size // 8  # with the actors' constructors
    for _ in range(3):
        sent.clear()
        assert peers.add.call(x).get(WAIT).values() == [0.0, 1.0, 2.0, 3.0]
        assert 2 * size <= sum(sent) < 2 * size + size // 8
    sent.clear()
    for future in peers.add.stream(x):
        future.get(WAIT)
    assert Accumulator(peers.add, 0.0, float.__add__).accumulate(x).get(WAIT) == 6
    assert 4 * size <= sum(sent) < 4 * size + size // 8
    assert torch.equal(x, torch.zeros(size // 4))


def test_it_goes_from_attached_hosts_to_the_programs_too(hosts: HostMesh) -> None:
    here = this_host().spawn_procs(per_host={"gpus": 2}).spawn("here", Peer)
    sender = hosts.slice(hosts=0).spawn_procs().spawn("sender", Peer)
    assert sender.ask_all.call_one(here, torch.ones(1 << 20)).get(WAIT) == [1.0, 2.0]
    assert here.heard.call().get(WAIT).values() == [[1, 2], [1, 3]]
    assert here._agents == (current.process().address,)  # by way of the root


@pytest.fixture
def came(hosts: HostMesh, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many messages with replies come to this process from others, by kind."""
    process, kinds = current.process(), Counter[int]()
    for kind in (REPLY, REPLIES):

        def counted(sender: str, head: Head, payload: Payload, handle=process.handlers[kind]) -> None:  # type: ignore[no-untyped-def]
            kinds[head[0]] += 1
            handle(sender, head, payload)

        monkeypatch.setitem(process.handlers, kind, counted)
    return kinds


def test_the_answers_of_a_host_come_together(hosts: HostMesh, came: Counter[int]) -> None:
    peers = spawn(hosts)
    peers.initialized.get(WAIT)
    came.clear()
    for _ in range(5):
        assert peers.heard.call().get(WAIT).values() == [[]] * 4
    assert came[REPLY] == 0 and 10 <= came[REPLIES] <= 20  # more where an answer took long
    peers.stop().get(WAIT)


def test_large_answers_and_errors_come_as_they_are(hosts: HostMesh) -> None:
    peers = spawn(hosts)
    x = torch.arange(1 << 18, dtype=torch.float32)
    assert all(torch.equal(back, 2 * x) for back in peers.double.call(x).get(WAIT).values())
    with pytest.raises(ActorError, match="not rank 2"):
        peers.only.call(2).get(WAIT)
    with pytest.raises(ActorError, match="not rank 7"):
        peers.only.call(7).get(WAIT)


def test_one_that_does_not_answer_keeps_no_other_answers_back(hosts: HostMesh) -> None:
    peers = spawn(hosts)
    process = current.process()
    waiting = peers.hang.call(3)
    (call,) = [call for call in process.ports.calls().values() if call.what == "peer.hang"]
    while set(call.pending()) != {3}:  # which comes within the test's time
        pass
    assert not waiting.done()


def test_the_death_of_one_is_told_and_the_others_go_on(hosts: HostMesh, faults: queue.SimpleQueue[MeshFailure]) -> None:
    peers = spawn(hosts)
    last = peers.slice(hosts=1, gpus=1)  # type: ignore[attr-defined]
    pid = last.pid.call_one().get(WAIT)
    waiting = peers.hang.call(3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        waiting.get(WAIT)
    assert "SIGKILL" in faults.get(timeout=WAIT).reason
    with pytest.raises(SupervisionError, match="SIGKILL"):
        peers.tell.broadcast(1)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        peers.heard.call().get(WAIT)
    assert peers.slice(hosts=0).heard.call().get(WAIT).values() == [[1], [1]]  # type: ignore[attr-defined]
    assert peers.slice(hosts=1, gpus=0).heard.call_one().get(WAIT) == [1]  # type: ignore[attr-defined]


def test_where_a_connection_to_an_agent_breaks_the_calls_by_way_of_it_fail(hosts: HostMesh) -> None:
    peers = spawn(hosts)
    sender = hosts.slice(hosts=0).spawn_procs().spawn("sender", Peer)
    others = peers.slice(hosts=1)  # type: ignore[attr-defined]
    assert "the connection is lost" in sender.lose_the_last_agent_of.call_one(others, 1, 8).get(WAIT)
    assert others.slice(gpus=0).heard.call_one().get(WAIT) == []


def test_where_it_was_asked_by_way_of_another_too(tmp_path: Path) -> None:
    with hosts_here(3, tmp_path) as three, monarch.hosts(three.addresses, token=TOKEN) as attached:
        hosts = attached
        peers = spawn(hosts)
        sender = hosts.slice(hosts=0).spawn_procs().spawn("sender", Peer)
        others = peers.slice(hosts=slice(1, 3))  # type: ignore[attr-defined]
        assert "the connection is lost" in sender.lose_the_last_agent_of.call_one(others, 3, 1).get(WAIT)
        assert others.slice(gpus=0).heard.call().get(WAIT).values() == [[]] * 2


def test_what_cannot_be_sent_keeps_nothing_back(hosts: HostMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = spawn(hosts)
    x, send = torch.ones(1 << 16), Link.send

    def full(self: Link, head: Head, payload: Payload) -> bool:
        if payload.sizes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return send(self, head, payload)

    for fan_out in (8, 1):
        with monkeypatch.context() as patch:
            patch.setattr(Link, "send", full)
            patch.setattr(spreading, "FAN_OUT", fan_out)
            with pytest.raises(OSError, match="Too many open files"):
                peers.add.broadcast(x)
            with pytest.raises(OSError, match="Too many open files"):
                peers.slice(hosts=1, gpus=1).add.call_one(x)  # type: ignore[attr-defined]
    peers.tell.broadcast(1)
    assert peers.heard.call().get(WAIT).values() == [[1]] * 4
    assert heard(peers, 1, 1) == [1]
    assert not current.process().spreads.kept


def test_what_was_answered_counts_whoever_hears_first_of_the_end(hosts: HostMesh) -> None:
    procs = hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 2})
    peers = procs.spawn("peer", Peer)
    pids = peers.pid.call().get(WAIT).values()
    sender = hosts.slice(hosts=0).spawn_procs().spawn("sender", Peer)
    assert sender.hear_of_the_end_first.call_one(peers, procs).get(WAIT) == pids


def test_who_is_younger_than_a_death_is_told_when_it_calls(
    hosts: HostMesh, faults: queue.SimpleQueue[MeshFailure]
) -> None:
    peers = spawn(hosts)
    os.kill(peers.slice(hosts=1, gpus=1).pid.call_one().get(WAIT), signal.SIGKILL)  # type: ignore[attr-defined]
    assert "SIGKILL" in faults.get(timeout=WAIT).reason
    sender = hosts.slice(hosts=0).spawn_procs().spawn("sender", Peer)
    answer = sender.ask.call_one(peers.slice(hosts=1)).get(WAIT)  # type: ignore[attr-defined]
    assert "cannot be reached" in answer or "was killed by SIGKILL" in answer  # where the news is still on its way


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host sends on to one other at most."""
    monkeypatch.setattr(spreading, "FAN_OUT", 1)


def test_to_many_hosts_it_goes_along_a_tree_of_them(
    chain: None, tmp_path: Path, sent: list[int], faults: queue.SimpleQueue[MeshFailure]
) -> None:
    with hosts_here(3, tmp_path) as three, monarch.hosts(three.addresses, token=TOKEN) as attached:
        size = 8 << 20
        x = torch.ones(size // 4)
        peers = spawn(attached, x)
        assert peers.total.call().get(WAIT).values() == [size / 4] * 6
        sent.clear()
        assert peers.add.call(x).get(WAIT).values() == [1.0 + rank for rank in range(6)]
        assert size <= sum(sent) < size + size // 8  # it leaves this host once

        first = three.running[0]
        first.send_signal(signal.SIGSTOP)  # what is sent now comes no further
        for number in range(100):
            peers.tell.broadcast(number)
        answers = peers.heard.call()
        first.kill()
        others = peers.slice(hosts=slice(1, 3))  # type: ignore[attr-defined]
        with pytest.raises(SupervisionError, match=three.addresses[0]):
            answers.get(WAIT)
        assert others.heard.call().get(WAIT).values() == [list(range(100))] * 4
        for _ in range(2):
            assert three.addresses[0] in faults.get(timeout=WAIT).reason
        others.tell.broadcast(100)
        assert others.heard.call().get(WAIT).values() == [list(range(101))] * 4
        while current.process().spreads.kept:  # until the last agent has said that it has it
            pass
