"""A tree of relays without processes or a network: what each sends lies in a queue for each link and direction, and the
test says which queue is emptied next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from monarch.runtime.control.records import Attach, Attached, HostInfo, Lost, Progress, Record, Start
from monarch.runtime.control.relay import PARENT, SERVICE, Action, Dial, Down, Drop, Event, Gone, Ready, Relay, Send, Up

CONTROLLER = -1


def info(number: int) -> HostInfo:
    return HostInfo(number, f"host{number}:1", f"host{number}", 1, 1, 1, "3", "2", "0", "net")


class Simulation:
    """`dead` hosts cannot be reached. Links are (above, below) pairs of host numbers."""

    def __init__(self, hosts: int, fan_out: int, dead: frozenset[int] = frozenset()) -> None:
        self.relays: dict[int, Relay] = {CONTROLLER: Relay(controller=True)}
        self.parent: dict[int, int] = {}
        self.child: dict[int, dict[int, int]] = {CONTROLLER: {}}
        self.index: dict[int, int] = {}
        self.queues: dict[tuple[int, int, str], deque[Record]] = {}
        self.dead = dead
        self.cut: set[tuple[int, int]] = set()
        self.got: dict[int, list[Record]] = {number: [] for number in range(hosts)}
        self.said: list[Record] = []
        self.frames: dict[tuple[int, int], int] = {}
        self.depth: dict[int, int] = {CONTROLLER: 0}
        addresses = tuple(f"host{number}:1" for number in range(hosts))
        self.feed(CONTROLLER, Down(Attach(0, addresses, fan_out, 1.0)))

    def feed(self, at: int, event: Event) -> None:
        for action in self.relays[at].handle(event):
            self._do(at, action)

    def _do(self, at: int, action: Action) -> None:
        match action:
            case Send(to, record) if to == PARENT and at == CONTROLLER:
                self.said.append(record)
            case Send(to, record) if to == PARENT:
                self._queue(self.parent[at], at, "up", record)
            case Send(to, record) if to == SERVICE:
                self.got[at].append(record)
            case Send(to, record):
                below = self.child[at][to]
                self.frames[at, below] = self.frames.get((at, below), 0) + 1
                self._queue(at, below, "down", record)
            case Dial(child, attach) if attach.number in self.dead:
                self.feed(at, Gone(child, "connection refused"))
            case Dial(child, attach):
                below = attach.number
                self.relays[below] = Relay()
                self.parent[below], self.index[below] = at, child
                self.depth[below] = self.depth[at] + 1
                self.child[at][child] = below
                self.child[below] = {}
                self._queue(at, below, "down", attach)
            case Drop(child, reason):
                self.feed(at, Gone(child, reason))

    def _queue(self, above: int, below: int, way: str, record: Record) -> None:
        if (above, below) not in self.cut:
            self.queues.setdefault((above, below, way), deque()).append(record)

    def step(self, choose: Callable[[int], int]) -> bool:
        """Let one record arrive; False when none is under way."""
        waiting = sorted(key for key, queue in self.queues.items() if queue)
        if not waiting:
            return False
        above, below, way = waiting[choose(len(waiting))]
        record = self.queues[above, below, way].popleft()
        if way == "up":
            self.feed(above, Up(self.index[below], record))
            return True
        self.feed(below, Down(record))
        if isinstance(record, Attach):
            self.feed(below, Ready(info(below)))
        return True

    def settle(self, choose: Callable[[int], int] = lambda _: 0) -> None:
        while self.step(choose):
            pass

    def lose(self, host: int, reason: str) -> None:
        """The stream to a host breaks: what is under way on it is gone, and nothing beneath is heard any more."""
        above = self.parent[host]
        self.cut.add((above, host))
        for way in ("up", "down"):
            self.queues.pop((above, host, way), None)
        self.feed(above, Gone(self.index[host], reason))

    # -- what the controller has heard -----------------------------------------------------------------------------

    @property
    def attached(self) -> list[int]:
        return [host.number for record in self.said if isinstance(record, Attached) for host in record.hosts]

    @property
    def failures(self) -> dict[int, str]:
        return dict(each for record in self.said if isinstance(record, Attached) for each in record.failures)

    @property
    def lost(self) -> list[int]:
        losses = [record for record in self.said if isinstance(record, Lost)]
        return [host for record in losses for host in range(record.start, record.stop)]

    def progress(self, kind: str) -> list[tuple[int, ...]]:
        return [record.numbers for record in self.said if isinstance(record, Progress) and record.kind == kind]

    def heads(self, host: int) -> list[bytes]:
        return [record.head for record in self.got[host] if isinstance(record, Start)]
