"""A simulated cluster: the control plane's own relays and outboxes, hosts and workers in miniature, joined by links on
which everything can be late. Nothing happens by itself: `step` lets one thing happen, chosen by chance, and an eighth
of a millisecond pass."""

from __future__ import annotations

import random
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from monarch.runtime.control.frames import Frames
from monarch.runtime.control.message import Message
from monarch.runtime.control.outbox import Outbox
from monarch.runtime.control.records import (
    Assembly,
    Attach,
    Attached,
    Forget,
    HostPart,
    Lost,
    Progress,
    Record,
    Start,
    ranges,
    started,
)
from monarch.runtime.control.relay import PARENT, SERVICE, Dial, Down, Drop, Event, Gone, Ready, Relay, Send, Up
from monarch.runtime.worker.peers import pack
from tests.runtime.control.simulated import CONTROLLER, info
from tests.simulation.host import Host, MeshPart
from tests.simulation.worker import Worker

SECONDS_A_STEP = 1 / 8000
IDLE_SECONDS = 0.25
SECONDS, STEPS = 3600.0, 1_000_000
"""A schedule that takes longer waits for something that never comes."""
QUIET_STEPS = 400
"""So many steps in which nobody hears of anything: only time can change that."""


_RESET = 0.01
"""How likely a connection is reset each time something may happen on it,"""
_LOST_JOINING = 0.002
"""How likely a host that joins is lost at each step until it has, where it may be."""
_KEPT = 6
"""and how many frames an end keeps then before it waits for the other."""


class Hangs(AssertionError):
    """The controller waits for ever."""


@dataclass
class Chances:
    """How often what can go wrong does, for each step of the cluster; `fail` for each step of a worker's program."""

    kill: float = 0.0
    link: float = 0.0
    host: float = 0.0
    fail: float = 0.0


@dataclass
class Link:
    """One direction of a stream between two hosts: what waits to be sent, what its sender keeps, and what is under
    way."""

    frames: Frames[list[Record]]
    """Those of its sender: what it sends on this direction, and how much it has taken from the other one."""
    outbox: Outbox = field(default_factory=Outbox)
    under_way: deque[tuple[list[Record], int]] = field(default_factory=deque)
    """Each with how many frames of the other direction its sender had taken."""


@dataclass(frozen=True)
class Named:
    address: str


class Cluster:
    """Also what `control.tree.HostTree` is to a mesh."""

    def __init__(
        self,
        hosts: int,
        fan_out: int,
        chance: random.Random,
        chances: Chances,
        resets: random.Random | None = None,
    ) -> None:
        """`resets` says when connections between hosts are reset; without it none is."""
        self.epoch = 0
        """The number of the session that begins next: all workers of the mesh know it by the same."""
        self.chance, self.chances, self._resets = chance, chances, resets
        self.now = 0.0
        self.calm = True
        """Nothing goes wrong as long as this is so."""
        self.happened: list[str] = []
        self.hosts = [Named(f"host{number}:1") for number in range(hosts)]
        self.at = {number: Host(self, number) for number in range(hosts)}
        self._relays: dict[int, Relay] = {CONTROLLER: Relay(controller=True)}
        self._parent: dict[int, int] = {}
        self._children: dict[int, dict[int, int]] = {CONTROLLER: {}}
        self._index: dict[int, int] = {}
        self._links: dict[tuple[int, int, str], Link] = {}
        self._shown: dict[tuple[int, MeshPart], deque[tuple[int, Any]]] = {}
        self._assembly = Assembly()
        self._subscribers: dict[int, tuple[Callable[[Message], None], Callable[[int, str], None]]] = {}
        self.lost: dict[int, str] = {}
        self._pids = 100
        self._unheard = hosts
        self._steps = self._quiet = 0
        self._wrong = chances.kill + chances.link + chances.host
        self._acts = (self._pass_on, self._show_some, self._serve, self._listen, self._work)
        self._paces = list(accumulate(chance.choice([1, 2, 4]) for _ in self._acts))
        self._fan_out = fan_out
        self._feed(CONTROLLER, Down(Attach(0, tuple(host.address for host in self.hosts), fan_out, 1.0)))
        while self._unheard:
            self.step()

    def join(self, lost: random.Random, refuses: bool) -> bool:
        """Attach another host, which may be `lost` meanwhile; whether it was attached."""
        number = len(self.hosts)
        self.at[number] = host = Host(self, number)
        host.refuses = refuses
        self._unheard = 1
        self._feed(CONTROLLER, Down(Attach(number, (host.address,), self._fan_out, 1.0)))
        while self._unheard:
            if lost.random() < _LOST_JOINING:
                self._cut_off(number)
            self.step()
        if host.attached:
            self.hosts.append(Named(host.address))
        else:
            del self.at[number]
        self.happened.append("join" if host.attached else "joined not")
        return host.attached

    def pid(self) -> int:
        self._pids += 1
        return self._pids

    def fails(self) -> bool:
        """Whether a worker's step fails now."""
        return not self.calm and self.chance.random() < self.chances.fail

    # -- what a connection sees ------------------------------------------------------------------------------------

    def send(self, message: Message, hosts: Sequence[int] | None = None) -> None:
        if message.kind in ("start", "renew"):
            message = replace(message, head={**message.head, "epoch": self.epoch})
        self._feed(CONTROLLER, Down(started(message, targets=None if hosts is None else ranges(hosts))))
        for _ in range(self.chance.randrange(4)):  # the world does not wait for the controller
            self.step()

    def subscribe(self, mesh: int, receive: Callable[[Message], None], lost: Callable[[int, str], None]) -> None:
        self._subscribers[mesh] = receive, lost
        for host, reason in list(self.lost.items()):
            lost(host, reason)

    def unsubscribe(self, mesh: int) -> None:
        self._subscribers.pop(mesh, None)
        self._feed(CONTROLLER, Down(Forget(mesh)))

    # -- the control plane -----------------------------------------------------------------------------------------

    def up(self, host: Host, record: Record) -> None:
        if host.attached:
            self._feed(host.number, Up(SERVICE, record))

    def _feed(self, at: int, event: Event) -> None:
        for action in self._relays[at].handle(event):
            match action:
                case Send(to, record) if to == PARENT and at == CONTROLLER:
                    self._heard(record)
                case Send(to, record) if to == PARENT:
                    self._put(self._parent[at], at, "up", record)
                case Send(to, record) if to == SERVICE:
                    assert isinstance(record, Start | HostPart)
                    if (message := self.at[at].assembly.take(record)) is not None:
                        self.at[at].messages.append(message)
                case Send(to, record):
                    self._put(at, self._children[at][to], "down", record)
                case Dial(child, attach):
                    below = attach.number
                    self._relays[below] = Relay()
                    self._parent[below], self._index[below] = at, child
                    self._children[at][child] = below
                    self._children[below] = {}
                    for way in ("up", "down"):
                        self._links[at, below, way] = Link(Frames(_KEPT if self._resets else 1 << 30))
                    self._put(at, below, "down", attach)
                case Drop(child, reason):
                    raise AssertionError(reason)

    def _put(self, above: int, below: int, way: str, record: Record) -> None:
        if (above, below, way) in self._links:
            self._links[above, below, way].outbox.put(record)

    def _heard(self, record: Record) -> None:
        message: Message | None = None
        if isinstance(record, Start | HostPart):
            message = self._assembly.take(record)
        elif isinstance(record, Progress):
            message = Message(record.kind, record.mesh, progress=record.numbers)
        elif isinstance(record, Attached):
            self._unheard -= len(record.hosts) + len(record.failures)
        elif isinstance(record, Lost):
            for host in range(record.start, record.stop):
                self.lost.setdefault(host, record.reason)
                for _, tell in list(self._subscribers.values()):
                    tell(host, record.reason)
        if message is not None and message.mesh in self._subscribers and message.host not in self.lost:
            self._subscribers[message.mesh][0](message)

    def _arrive(self, above: int, below: int, way: str, records: list[Record]) -> None:
        for record in records:
            if way == "up":
                self._feed(above, Up(self._index[below], record))
            else:
                self._feed(below, Down(record))
                if isinstance(record, Attach):
                    self._feed(below, Ready(info(below)))

    def _cut_off(self, host: int) -> None:
        """The stream to a host breaks, and all beneath it are out of reach."""
        above = self._parent[host]
        for key in [key for key in self._links if key[:2] == (above, host)]:
            del self._links[key]
        beneath = [host]
        for number in beneath:
            beneath += [each for each in self._children[number].values() if (number, each, "up") in self._links]
            self.at[number].attached = False
            self.at[number].stop()
        self._feed(above, Gone(self._index[host], "the connection was reset"))

    # -- between workers of different hosts --------------------------------------------------------------------------

    def mirror(self, worker: Worker) -> None:
        """Have the other hosts be shown what a worker shows on its own."""
        memory, rank = worker.memory, worker.rank
        shown = memory.progress[rank], memory.gave_up[rank], worker.shown
        for host in self.at.values():
            for part in host.parts:
                if part.mirrors(rank):
                    self._shown.setdefault((rank, part), deque()).append((worker.epoch, shown))

    def _show(self, key: tuple[int, MeshPart]) -> None:
        rank, part = key
        epoch, (progress, gave_up, area) = self._shown[key].popleft()
        if part.memory is None:
            return
        counterpart = part.counterpart(rank)
        if counterpart.alive and counterpart.joined and counterpart.epoch == epoch:  # or else the link has ended
            part.memory.progress[rank], part.memory.gave_up[rank] = progress, gave_up
            part.memory.area[rank, progress[0]] = area

    def _break_link(self, one: MeshPart, other: MeshPart) -> None:
        """Both ends of a link between workers find it broken."""
        place = self.chance.randrange(len(one.here))
        for mine, theirs in ((one, other), (other, one)):
            worker = mine.workers[mine.here[place]]
            if worker.alive and worker.joined and mine.memory is not None:
                mine.memory.dead = True
                worker.said.append(pack({"lost": theirs.here[place], "why": "reset"}))

    # -- what happens ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one thing happen, or nothing; whether anything has lately."""
        self.now += SECONDS_A_STEP
        self._steps += 1
        if self.now > SECONDS or self._steps > STEPS:
            raise Hangs
        if not self.calm and self.chance.random() < self._wrong:
            self._go_wrong()
        self._quiet = self._quiet + 1 if self._quiet < QUIET_STEPS else 0
        self._acts[bisect(self._paces, self.chance.random() * self._paces[-1])]()
        return self._quiet < QUIET_STEPS

    def _pass_on(self) -> None:
        if not self._links:
            return
        key = self.chance.choice(list(self._links))
        above, below, way = key
        link, frames = self._links[key], self._links[key].frames
        if self._resets and self._resets.random() < _RESET:
            self._reset(above, below)
        if link.under_way and (not link.outbox or self.chance.random() < 0.5):
            self._quiet = 0
            records, taken = link.under_way.popleft()
            receiver = self._links[above, below, "down" if way == "up" else "up"].frames
            receiver.acknowledged(taken)
            receiver.take(1)
            self._arrive(*key, records)
        elif not frames.written or (link.outbox and not frames.full) or frames.due:
            self._quiet = 0
            if frames.written:
                frames.put([] if frames.full else link.outbox.take(), 1)
            link.under_way.append((frames.next(), frames.say()))

    def _reset(self, above: int, below: int) -> None:
        """The connection between two hosts is reset, with all that is under way, and there is another one."""
        down, up = self._links[above, below, "down"], self._links[above, below, "up"]
        if down.under_way or up.under_way:
            self.happened.append("reset")
        for one, other in ((down, up), (up, down)):
            one.under_way.clear()
            one.frames.go_on(other.frames.taken)

    def _show_some(self) -> None:
        if self._shown and self._shown[key := self.chance.choice(list(self._shown))]:
            self._quiet = 0
            self._show(key)

    def _serve(self) -> None:
        host = self.at[int(self.chance.random() * len(self.at))]
        if host.messages:
            self._quiet = 0
            host.receive(host.messages.popleft())

    def _listen(self) -> None:
        self.at[int(self.chance.random() * len(self.at))].listen()

    def _work(self) -> None:
        host = self.at[int(self.chance.random() * len(self.at))]
        if workers := host.workers:
            worker = workers[self.chance.choice(list(workers))]
            if worker.alive:
                next(worker.turns)

    def _go_wrong(self) -> None:
        up = [host for host in self.at.values() if host.parts]
        if not up:
            return
        host = self.chance.choice(up)
        (what,) = self.chance.choices(
            ("kill", "link", "host"), (self.chances.kill, self.chances.link, self.chances.host)
        )
        if what == "host":
            self._cut_off(host.number)
        elif what == "kill":
            rank = self.chance.choice(list(host.workers))
            if not host.workers[rank].alive:
                return
            what = f"kill {rank}"
            host.part_of(rank).kill(rank)
        elif len(up) > 1:
            one, other = (host.parts[-1] for host in self.chance.sample(up, 2))
            self._break_link(one, other)
        self.happened.append(what)
