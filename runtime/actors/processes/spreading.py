"""What is sent to several processes of another host: once, to that host's agent, which spreads it there.

    sender ──SPREAD──▶ agent ──▶ each process: its own head and number, and the payload, which all of them share
    sender ◀─REPLIES── agent ◀── each process: the answers to a `call`, sent on together

Numbers keep the order (`messages.order`). The agent sends answers on once all are there, or those that are there after
`LATE_SECONDS`, and then each at once; errors and what is large it sends on as they come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.address import host_of
from monarch.runtime.actors.messages.message import EMPTY, INLINE, Payload
from monarch.runtime.actors.messages.protocol import NUMBERED, RELAY, REPLIES, REPLY, SPREAD, Head
from monarch.runtime.actors.processes.ports import Answer, Decode

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.process import Process

MOST = 256
"""How many processes one message can be for: their heads have to fit into a packet."""
LATE_SECONDS = 0.5


class Audience:
    """Processes that are sent the same thing, by place, and the agents of their hosts as far as they are known."""

    def __init__(self, addresses: Sequence[str], agents: Iterable[str]) -> None:
        self._addresses = addresses
        by_host = {host_of(agent): agent for agent in agents}
        places: dict[str, list[int]] = {}
        for place, address in enumerate(addresses):
            places.setdefault(host_of(address), []).append(place)
        self._hosts = [(host, by_host.get(host), which) for host, which in places.items()]

    def send(self, process: Process, head: Callable[[int], Head], payload: Payload, gather: bool = False) -> list[int]:
        """Send each place its head, and all the payload; the places that are known to be gone. With `gather` answers
        may come together, to heads that have (address, port, place) third."""
        here, router, addresses = host_of(process.address), process.router, self._addresses
        failed: list[int] = []
        for host, agent, places in self._hosts:
            if host == here or agent is None or len(places) == 1:
                failed += [place for place in places if not router.send(addresses[place], head(place), payload)]
                continue
            there = [place for place in places if router.reaches(addresses[place])]
            failed += sorted(set(places).difference(there))
            for begin in range(0, len(there), MOST):
                some = there[begin : begin + MOST]
                if not process.spreads.send(agent, [(addresses[at], head(at)) for at in some], payload, gather):
                    failed += some
        return failed


class Spreads:
    """What a process has sent by way of agents."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._through: dict[str, set[str]] = {}

    def send(self, agent: str, heads: Sequence[tuple[str, Head]], payload: Payload, gather: bool) -> bool:
        """False where the agent, and so its host, is known to be gone."""
        router = self._process.router
        self._through.setdefault(agent, set()).update(address for address, _ in heads)
        to = tuple((address, router.numbers.to(address)(), head) for address, head in heads)
        return router.send(agent, (SPREAD, to, gather), payload)

    def through(self, agent: str) -> Iterable[str]:
        """The processes that something was sent to by way of an agent: if it is not reached, what they have may lack
        something."""
        return self._through.pop(agent, ())


class Spreading:
    """The agent's part: on attached hosts, and on the program's host the root's."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._young: list[_Gathered] = []
        process.handle(SPREAD, self._on_spread)

    def _on_spread(self, sender: str, head: Head, payload: Payload) -> None:
        _, receivers, gather = head
        process = self._process
        gathered: _Gathered | None = None
        port = -1
        if gather:
            address, asked, _ = receivers[0][2][2]
            gathered = _Gathered(process, address, asked, {inner[2][2]: to for to, _, inner in receivers})
            port = process.ports.open(gathered)
            self._young.append(gathered)
            if len(self._young) == 1:
                self._later()
        for to, number, inner in receivers:
            if gathered is not None:
                inner = (*inner[:2], (process.address, port, inner[2][2]), *inner[3:])
            sent = process.router.send(to, (RELAY, to, sender, (NUMBERED, number, inner)), payload)
            if not sent and gathered is not None and gathered.lost(to, SupervisionError("its process is gone")):
                process.ports.close(port)

    def _later(self) -> None:
        timer = threading.Timer(LATE_SECONDS, self._process.router.soon, [self._late])
        timer.daemon = True
        timer.start()

    def _late(self) -> None:
        before = monotonic() - LATE_SECONDS
        for gathered in self._young:
            if gathered.since <= before:
                gathered.wait_no_more()
        self._young = [gathered for gathered in self._young if not gathered.late]
        if self._young:
            self._later()


class _Gathered:
    """The answers of processes here to one call from another host. Called from any thread."""

    def __init__(self, process: Process, address: str, port: int, waiting: dict[int, str]) -> None:
        self.since = monotonic()
        self.late = False
        self._process = process
        self._to = address
        self._port = port
        self._waiting = waiting
        self._ready: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, place: int, well: bool, decode: Decode) -> bool:
        assert isinstance(decode, Answer)
        payload = decode.payload
        with self._lock:
            if self._waiting.pop(place, None) is None:
                return not self._waiting
            if well and payload.data is not None and not payload.sizes and not payload.lent:
                self._ready.append((place, payload.data))
                self._bytes += len(payload.data)
            else:
                self._process.router.send(self._to, (REPLY, self._port, place, well), payload)
            if self.late or self._bytes > INLINE or not self._waiting:
                self._send()
            return not self._waiting

    def lost(self, address: str, error: SupervisionError) -> bool:
        """What they answered goes out before it is told that they have ended, which the caller hears by itself."""
        with self._lock:
            if address == self._to:
                return True
            self._waiting = {place: at for place, at in self._waiting.items() if at != address}
            self._send()
            return not self._waiting

    def wait_no_more(self) -> None:
        with self._lock:
            self.late = True
            self._send()

    def _send(self) -> None:
        ready, self._ready, self._bytes = tuple(self._ready), [], 0
        if ready:
            self._process.router.send(self._to, (REPLIES, self._port, ready), EMPTY)
