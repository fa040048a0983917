"""The tree of agents along which a message goes to many hosts, simulated: hosts are lost, connections break, and what
is under way comes in any order that the ways allow. Every process that lives gets everything, once, in order."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.runtime.actors.messages.address import host_of
from monarch.runtime.actors.messages.message import EMPTY, INLINE, PACKET, Payload
from monarch.runtime.actors.messages.order import Numbers, Order
from monarch.runtime.actors.messages.protocol import CALL, NUMBERED, RELAY, Head
from monarch.runtime.actors.processes import spreading
from monarch.runtime.actors.processes.ports import Ports
from monarch.runtime.actors.processes.spreading import MOST, Audience, Share, Spreads, branches, tree


def address(host: int, process: int) -> str:
    return f"{process:032}@{host}/host{host}:1"


class Simulated:
    """A process, and its router."""

    def __init__(self, address: str, network: Network) -> None:
        self.address = address
        self.network = network
        self.numbers = Numbers()
        self.ports = Ports()
        self.router = self
        self.gone: set[str] = set()
        self.handlers: dict[int, Callable[[str, Head, Payload], None]] = {}
        self.order: Order[Head] = Order()
        self.got: list[Head] = []
        self.spreads = Spreads(self)  # type: ignore[arg-type]

    def handle(self, kind: int, handler: Callable[[str, Head, Payload], None]) -> None:
        self.handlers[kind] = handler

    def reaches(self, to: str) -> bool:
        return to not in self.gone

    def send(self, to: str, head: Head, payload: Payload) -> bool:
        if to in self.gone:
            return False
        if host_of(to) != host_of(self.address):
            head = NUMBERED, self.numbers.to(to)(), head
        self.network.under_way.setdefault((self.address, to), deque()).append(head)
        return True

    def deliver(self, sender: str, head: Head) -> None:
        if head[0] == RELAY:
            self.deliver(head[2], head[3])
        elif head[0] == NUMBERED:
            for ready in self.order.take(sender, head[1], head[2]):
                self.deliver(sender, ready)
        elif head[0] in self.handlers:
            self.handlers[head[0]](sender, head, EMPTY)
        else:
            self.got.append(head)

    def lost(self, address: str) -> None:
        self.gone.add(address)
        self.spreads.lost(address)


class Network:
    def __init__(self, hosts: int, gpus: int) -> None:
        self.under_way: dict[tuple[str, str], deque[Head]] = {}
        self.news: list[tuple[str, str]] = []
        """Who has yet to hear of whose end."""
        self.agents = [address(host, 0) for host in range(1, hosts + 1)]
        self.actors = [address(host, 1 + gpu) for host in range(1, hosts + 1) for gpu in range(gpus)]
        everyone = [address(0, 0), *self.agents, *self.actors]
        self.processes = {address: Simulated(address, self) for address in everyone}
        self.sender = self.processes[everyone[0]]

    def step(self, random: random.Random) -> bool:
        """Have one thing arrive that is under way, if anything is."""
        ways = [way for way, heads in self.under_way.items() if heads]
        choice = random.randrange(len(ways) + len(self.news)) if ways or self.news else None
        if choice is None:
            return False
        if choice < len(ways):
            sender, to = ways[choice]
            head = self.under_way[sender, to].popleft()
            if to in self.processes:
                self.processes[to].deliver(sender, head)
        else:
            who, lost = self.news.pop(choice - len(ways))
            if who in self.processes:
                self.processes[who].lost(lost)
        return True

    def kill(self, host: int) -> None:
        """A host is lost, with what it has not sent."""
        for lost in [each for each in self.processes if host_of(each) == host_of(self.agents[host])]:
            del self.processes[lost]
            for way in [way for way in self.under_way if lost in way]:
                del self.under_way[way]
            self.news += [(who, lost) for who in self.processes]

    def cut(self, one: int, other: int) -> None:
        """The connection of two agents breaks; both notice, at some time."""
        for way in ((self.agents[one], self.agents[other]), (self.agents[other], self.agents[one])):
            self.under_way.pop(way, None)
            self.news.append(way)


@given(
    hosts=st.integers(1, 12),
    gpus=st.integers(1, 2),
    fan_out=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    lost=st.sets(st.integers(0, 11), max_size=3),
    cut=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=2),
)
def test_everyone_who_lives_gets_everything_in_order(
    hosts: int, gpus: int, fan_out: int, seed: int, lost: set[int], cut: set[tuple[int, int]]
) -> None:
    chance = random.Random(seed)
    network = Network(hosts, gpus)
    sender: Any = network.sender
    todo: list[Callable[[], object]] = []
    sent: dict[str, list[Head]] = {actor: [] for actor in network.actors}

    def spread(number: int) -> None:
        some = sorted(chance.sample(network.actors, chance.randint(1, len(network.actors))))
        for actor in some:
            sent[actor].append(("spread", number))
        Audience(some, network.agents).send(sender, lambda place: ("spread", number), EMPTY)

    def one(number: int) -> None:
        actor = chance.choice(network.actors)
        sent[actor].append(("one", number))
        sender.send(actor, ("one", number), EMPTY)

    todo += [lambda n=n: spread(n) if n % 3 else one(n) for n in range(20)]  # type: ignore[misc]
    for host in lost:
        if host < hosts:
            todo.insert(chance.randint(0, len(todo)), lambda host=host: network.kill(host))  # type: ignore[misc]
    for a, b in cut:
        if a < hosts and b < hosts and a != b:
            todo.insert(chance.randint(0, len(todo)), lambda a=a, b=b: network.cut(a, b))  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spreading, "FAN_OUT", fan_out)
        for action in todo:
            action()
            for _ in range(chance.randint(0, 20)):
                network.step(chance)
        while network.step(chance):
            pass
    for actor in network.actors:
        if actor in network.processes:
            assert network.processes[actor].got == sent[actor]
    for process in network.processes.values():
        assert not process.spreads.kept and not process.spreads.passed


@pytest.mark.parametrize("name", [8, 63, 253])
@pytest.mark.parametrize(("hosts", "gpus"), [(1000, 1), (500, 2), (100, 8), (1, 1000)])
def test_every_packet_is_small_enough_whatever_hosts_are_called(name: int, hosts: int, gpus: int) -> None:
    tags = [f"{host}/{'h' * name}:40000" for host in range(hosts)]
    actors = [f"{gpu:032}@{tag}" for tag in tags for gpu in range(gpus)]
    agents = [f"{gpus:032}@{tag}" for tag in tags]
    network: Any = SimpleNamespace(under_way={})
    sender: Any = Simulated(f"{0:032}@{hosts}/{'h' * name}:40000", network)

    def head(place: int) -> Head:
        reply = sender.address, 10**6, place
        return CALL, f"{sender.address}.{10**6}", reply, "endpoint", False, (place, ("hosts", "gpus"), (hosts, gpus))

    assert Audience(actors, agents).send(sender, head, EMPTY, gather=True) == []
    sent = [head for heads in network.under_way.values() for head in heads]
    assert max(len(pickle.dumps((head, b"x" * INLINE, (), ()), 5)) for head in sent) < PACKET


@given(st.lists(st.integers(1, MOST), min_size=1, max_size=40), st.integers(1, 8))
def test_a_tree_has_each_host_once_and_no_message_is_for_too_many(sizes: list[int], fan_out: int) -> None:
    shares: list[Share] = [(f"agent{at}", ((f"actor{at}", 0, ()),) * size) for at, size in enumerate(sizes)]
    parts = branches(shares, fan_out)
    assert [share for part in parts for share in part] == shares
    assert all(sum(len(receivers) for _, receivers in part) <= MOST for part in parts)
    assert len(parts) <= fan_out or sum(sizes) > MOST

    def hosts(branch: Any) -> tuple[list[Share], int]:
        agent, receivers, below = branch
        assert len(below) <= fan_out
        found = [hosts(each) for each in below]
        return [(agent, receivers), *(share for shares, _ in found for share in shares)], 1 + max(
            (depth for _, depth in found), default=0
        )

    for part in parts:
        found, depth = hosts(tree(part, fan_out))
        assert found == part
        if fan_out > 1:
            assert fan_out ** (depth - 2) <= len(part)
