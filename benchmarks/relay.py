"""How long one command takes to reach N hosts, and the controller's own CPU time for it.

MEASURED: real agents, each a process on this machine, over gRPC with a token: one host, a chain of two, and eight
directly. Their clocks are one, so a host's time of arrival can be compared with the controller's time of sending. All
share this machine's cores, which makes eight of them slower than eight machines would be.

SIMULATED: N = 8, 64, 512, 4,096 hosts with a fan-out of 8. The relays' real state machines pass real records on, in
virtual time; every hop costs what it was just measured to cost, and every host has its own processor:

    first    CPU that a sender needs for a command, however many children it is for
    child    and for each child that it goes to, one after the other
    wire     from the end of that until the next host's service has it
    relay    what a host needs before it passes a command on, in place of `first`
    up       for one hop of the answer, which is combined on the way

The answer is progress, of which the controller gets the least over all hosts: one number a child, however many hosts
are beneath it.
"""

from __future__ import annotations

import heapq
import itertools
import multiprocessing as mp
import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import duration
from monarch.runtime.control.message import Message, Reply
from monarch.runtime.control.records import Attach, Attached, HostInfo, Progress, Record, Start
from monarch.runtime.control.relay import PARENT, SERVICE, Action, Dial, Down, Event, Ready, Relay, Send, Up
from monarch.runtime.control.security import Security
from monarch.runtime.control.tree import HostTree

TOKEN = "a token for this measurement only"
REAL = 8
FAN_OUT = 8
SIZES = (8, 64, 512, 4096)
COMMANDS, WARM = 300, 50
CONTROLLER = -1


# -- measured --------------------------------------------------------------------------------------------------------


class Timed:
    """Tells when a command came: as a message of its own ("when"), or as progress that is combined ("done")."""

    def __init__(self, reply: Reply, info: HostInfo) -> None:
        self._reply = reply
        self._number = info.number

    def receive(self, message: Message) -> None:
        now = time.monotonic_ns()
        if message.kind == "when" and self._number in message.head["who"]:
            self._reply(Message("when", head={"at": now}))
        elif message.kind == "done":
            self._reply(Message("done", progress=(message.head["count"],)))

    def detached(self) -> None:
        pass


def _host(pipe: Any) -> None:
    from monarch.runtime.control.agent import serve

    agent = serve("127.0.0.1:0", Security.token(TOKEN), Timed)
    pipe.send(agent.address)
    pipe.recv()
    agent.close()


@contextmanager
def agents(count: int) -> Iterator[list[str]]:
    """The addresses of real hosts, forked before gRPC has threads here."""
    pipes = []
    processes = []
    context = mp.get_context("fork")
    for _ in range(count):
        here, there = context.Pipe()
        process = context.Process(target=_host, args=(there,), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    try:
        yield [pipe.recv() for pipe in pipes]
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()


@dataclass(frozen=True)
class Measured:
    """Medians, in seconds: until the last host had a command, until the controller knew that all have done it, and the
    controller's CPU time for such a command. `sent` is its CPU time for a command that only one host answers."""

    arrived: float
    done: float
    cpu: float
    sent: float


def measure_tree(addresses: Sequence[str], fan_out: int) -> Measured:
    tree = HostTree(addresses, Security.token(TOKEN), fan_out)
    try:
        heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        tree.subscribe(0, heard.put, lambda host, reason: None)
        everybody = range(len(addresses))
        arrived, done = [], []
        for _ in range(WARM + COMMANDS):
            start = time.monotonic_ns()
            tree.send(Message("when", head={"who": list(everybody)}))
            arrived.append(max(heard.get().head["at"] for _ in everybody) - start)
        cpu = [0.0, 0.0]
        for at in range(WARM + COMMANDS):
            if at == WARM:
                cpu[0] = time.process_time()
            start = time.monotonic_ns()
            tree.send(Message("done", head={"count": at}))
            while heard.get().progress != (at,):
                pass
            done.append(time.monotonic_ns() - start)
        cpu[1] = time.process_time()
        for _ in range(COMMANDS):
            tree.send(Message("when", head={"who": [0]}))
            heard.get()
        sent = time.process_time() - cpu[1]
    finally:
        tree.close()
    return Measured(
        statistics.median(arrived[WARM:]) / 1e9,
        statistics.median(done[WARM:]) / 1e9,
        (cpu[1] - cpu[0]) / COMMANDS,
        sent / COMMANDS,
    )


# -- simulated -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds; see the top of this file."""

    first: float
    child: float
    wire: float
    relay: float
    up: float

    @classmethod
    def of(cls, one: Measured, chain: Measured, eight: Measured) -> Costs:
        child = max((eight.sent - one.sent) / (REAL - 1), 0.0)
        first = max(one.sent / 2 - child, 0.0)  # the other half is for the answer
        wire = max(one.arrived - first - child, 0.0)
        relay = max(chain.arrived - one.arrived - child - wire, 0.0)
        return cls(first, child, wire, relay, max(one.done - one.arrived, 0.0))


class Simulation:
    """A tree of real relays in virtual time."""

    def __init__(self, hosts: int, costs: Costs) -> None:
        self.now = 0.0
        self._costs = costs
        self._order = itertools.count()
        self._events: list[tuple[float, int, int, Event]] = []
        self._relays = {CONTROLLER: Relay(controller=True)}
        self._parents: dict[int, tuple[int, int]] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._busy: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        self.said: list[tuple[float, Record]] = []
        self.controllers_frames = 0
        self.controllers_seconds = 0.0
        self._push(0.0, CONTROLLER, Down(Attach(0, tuple(f"host{n}:1" for n in range(hosts)), FAN_OUT, 1.0)))
        self._run()
        assert sum(len(record.hosts) for _, record in self.said if isinstance(record, Attached)) == hosts

    def command(self, count: int) -> tuple[float, float]:
        """Until the last host has it, and until the controller knows that all have done it."""
        self.arrived.clear()
        self.said.clear()
        self._busy.clear()
        self.controllers_frames, self.controllers_seconds = 0, 0.0
        start = self.now
        self._push(start, CONTROLLER, Down(Start("command", 1, head=b'{"count":%d}' % count)))
        self._run()
        (done,) = [at for at, record in self.said if isinstance(record, Progress) and record.numbers == (count,)]
        return max(self.arrived.values()) - start, done - start

    def _push(self, at: float, host: int, event: Event) -> None:
        heapq.heappush(self._events, (at, next(self._order), host, event))

    def _run(self) -> None:
        while self._events:
            at, _, host, event = heapq.heappop(self._events)
            self.now = max(at, self._busy.get(host, 0.0))
            began = time.process_time_ns()
            actions = self._relays[host].handle(event)
            if host == CONTROLLER:
                self.controllers_seconds += (time.process_time_ns() - began) / 1e9
            self._do(host, event, actions)

    def _do(self, host: int, event: Event, actions: list[Action]) -> None:
        costs, clock = self._costs, self.now
        if isinstance(event, Down) and any(isinstance(action, Send) and action.to >= 0 for action in actions):
            clock += costs.first if host == CONTROLLER else costs.relay
        for action in actions:
            match action:
                case Dial(child, attach):
                    self._relays[attach.number] = Relay()
                    self._parents[attach.number] = host, child
                    self._children[host, child] = attach.number
                    self._push(clock, attach.number, Down(attach))
                    info = HostInfo(attach.number, attach.addresses[0], "", 1, 1, 1, "", "", "", "")
                    self._push(clock, attach.number, Ready(info))
                case Send(to, record) if to == SERVICE:
                    self.arrived[host] = self.now
                    assert isinstance(record, Start)
                    self._push(self.now, host, Up(SERVICE, Progress("done", 1, (int(record.head[9:-1]),))))
                case Send(to, record) if to == PARENT and host == CONTROLLER:
                    self.said.append((self.now, record))
                case Send(to, record) if to == PARENT:
                    above, child = self._parents[host]
                    self._push(clock + costs.up, above, Up(child, record))
                case Send(to, record):
                    clock += costs.child
                    self._push(clock + costs.wire, self._children[host, to], Down(record))
                    self.controllers_frames += host == CONTROLLER
        self._busy[host] = clock


# -- what is printed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    hosts: int
    how: str
    arrived: float
    done: float
    cpu: float
    note: str


def measure() -> tuple[Costs, list[Line]]:
    with agents(REAL) as addresses:
        one = measure_tree(addresses[:1], FAN_OUT)
        chain = measure_tree(addresses[:2], 1)
        eight = measure_tree(addresses, FAN_OUT)
        deep = measure_tree(addresses, 2)
    costs = Costs.of(one, chain, eight)
    lines = [
        Line(1, "measured", one.arrived, one.done, one.cpu, "one hop"),
        Line(2, "measured", chain.arrived, chain.done, chain.cpu, "two hops"),
        Line(REAL, "measured", eight.arrived, eight.done, eight.cpu, "fan-out 8; all share this machine's cores"),
        Line(REAL, "measured", deep.arrived, deep.done, deep.cpu, "fan-out 2; all share this machine's cores"),
    ]
    for hosts in SIZES:
        simulation = Simulation(hosts, costs)
        simulation.command(0)
        arrived, done = simulation.command(1)
        frames = simulation.controllers_frames
        # What eight children cost for real; and the state machine's own part of that, here for this many hosts.
        note = f"{frames} frames from the controller, {duration(simulation.controllers_seconds)} CPU in its relay"
        lines.append(Line(hosts, "simulated", arrived, done, eight.cpu * frames / REAL, note))
    return costs, lines


def cells(line: Line) -> tuple[str, ...]:
    return f"{line.hosts:,}", line.how, *(duration(each) for each in (line.arrived, line.done, line.cpu)), line.note


HEAD = ("hosts", "how", "reaches all", "known to be done by all", "controller's CPU", "note")


def main() -> None:
    costs, lines = measure()
    for name in ("first", "child", "wire", "relay", "up"):
        print(f"{name:6} {duration(getattr(costs, name))}")
    for line in [HEAD, *map(cells, lines)]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, (6, 10, 12, 24, 17, 0), strict=True)))


if __name__ == "__main__":
    main()
