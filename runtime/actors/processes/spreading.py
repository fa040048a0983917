"""Messages to several processes of other hosts: once to each host, whose agent spreads them there.

    sender ──SPREAD──▶ agent ──▶ each process: its own head and number, and the payload, which all of them share
    sender ◀─REPLIES── agent ◀── each process: the answers to a `call`, sent on together

Numbers keep the order (`messages.order`). The agent sends answers on once all are there, or those that are there after
`LATE_SECONDS`, and then each at once; errors and what is large it sends on as they come.

To more than `FAN_OUT` hosts it goes along a tree of their agents, and each says to whom it has it from that it, and all
below, have it (TAKEN). Until then the sender keeps it. If an agent is lost meanwhile, or cannot reach another
(UNTAKEN), the sender sends it to all agents of that branch itself: what a process gets twice has the same number, and
is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from monarch.runtime.actors.messages.address import host_of
from monarch.runtime.actors.messages.message import EMPTY, INLINE, PACKET, Payload
from monarch.runtime.actors.messages.protocol import (
    NUMBERED,
    READY,
    RELAY,
    REPLIES,
    REPLY,
    SPREAD,
    TAKEN,
    UNREACHED,
    UNSENT,
    UNTAKEN,
    Head,
)
from monarch.runtime.actors.processes.ports import Answer, Decode, One
from monarch.runtime.shared.tree import split

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.process import Process

FAN_OUT = 8
MOST = 256
"""How many processes one message can be for, or fewer where addresses are long: their heads have to fit a packet."""
_HEADS = PACKET - INLINE - (4 << 10)
_BESIDES = 128  # the bytes of a head, without the addresses of its actor, its process and that one's agent
LATE_SECONDS = 0.5

Receivers: TypeAlias = tuple[tuple[str, int, Head], ...]
"""Processes of one host: the address, the number and the head for each."""
Share: TypeAlias = tuple[str, Receivers]
"""An agent, and those that it spreads to."""
Branch: TypeAlias = tuple[str, Receivers, tuple[Any, ...]]
"""Likewise, and the branches below."""


class Audience:
    """Processes that are sent the same thing, by place, and the agents of their hosts as far as they are known."""

    def __init__(self, addresses: Sequence[str], agents: Iterable[str]) -> None:
        self._addresses = addresses
        by_host = {host_of(agent): agent for agent in agents}
        places: dict[str, list[int]] = {}
        for place, address in enumerate(addresses):
            places.setdefault(host_of(address), []).append(place)
        self._most = _most(addresses)
        self._hosts = [(host, by_host.get(host), which) for host, which in places.items()]

    def send(self, process: Process, head: Callable[[int], Head], payload: Payload, gather: bool = False) -> list[int]:
        """Send each place its head, and all the payload; the places that are known to be gone. With `gather` answers
        may come together, to heads that have (address, port, place) third."""
        here, router, addresses = host_of(process.address), process.router, self._addresses
        many = len(self._hosts) > FAN_OUT
        failed: list[int] = []
        shares: list[tuple[str, list[int]]] = []
        for host, agent, places in self._hosts:
            if host == here or agent is None or (len(places) == 1 and not many):
                failed += [place for place in places if not router.send(addresses[place], head(place), payload)]
                continue
            there = [place for place in places if router.reaches(addresses[place])]
            failed += sorted(set(places).difference(there))
            shares += [(agent, there[begin : begin + self._most]) for begin in range(0, len(there), self._most)]
        if shares:
            numbers = router.numbers
            sent = [
                (agent, tuple((addresses[at], numbers.to(addresses[at])(), head(at)) for at in some))
                for agent, some in shares
            ]
            try:
                gone = process.spreads.send(sent, payload, gather)
            except BaseException:  # see `router`
                unsent = [(agent, tuple((to, number, (UNSENT,)) for to, number, _ in some)) for agent, some in sent]
                process.spreads.send(unsent, EMPTY, False)
                raise
            failed += [at for agent, some in shares if agent in gone for at in some]
        return failed


def _most(addresses: Iterable[str]) -> int:
    return min(MOST, _HEADS // (3 * max(map(len, addresses), default=0) + _BESIDES))


def branches(shares: Sequence[Share], fan_out: int) -> list[list[Share]]:
    """So many equal parts, or more, so that none is for more processes than a message can be for."""
    most = _most(agent for agent, _ in shares)
    parts: list[list[Share]] = []
    for begin, end in split(len(shares), fan_out):
        part: list[Share] = []
        for share in shares[begin:end]:
            if part and sum(len(receivers) for _, receivers in part) + len(share[1]) > most:
                parts.append(part)
                part = []
            part.append(share)
        parts.append(part)
    return parts


def tree(shares: Sequence[Share], fan_out: int) -> Branch:
    """The first has the others below it, in at most so many branches, and so on."""
    (agent, receivers), rest = shares[0], shares[1:]
    return agent, receivers, tuple(tree(rest[begin:end], fan_out) for begin, end in split(len(rest), fan_out))


@dataclass(frozen=True)
class _Kept:
    """Messages that a branch of the tree may not have yet."""

    shares: Sequence[Share]
    payload: Payload


class _Passed:
    """A message that an agent has passed on: its sender, and the branches that have not confirmed it."""

    def __init__(self, above: str, below: set[str]) -> None:
        self.above = above
        self.below = below


class Spreads:
    """A process' share in this: as a sender, and as the agent of its host, if it is that. All but `send` in the I/O
    thread."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.sent_through: dict[str, set[str]] = {}
        self._tokens = count()
        self.kept: dict[int, _Kept] = {}
        self.passed: dict[tuple[str, int], _Passed] = {}
        self._young: list[Gathered] = []
        process.handle(SPREAD, self._on_spread)
        process.handle(TAKEN, self._on_taken)
        process.handle(UNTAKEN, self._on_untaken)

    # -- the sender's part ---------------------------------------------------------------------------------------------

    def send(self, shares: Sequence[Share], payload: Payload, gather: bool) -> set[str]:
        """The agents that are known to be gone, and so their hosts. From any thread."""
        if len(shares) <= FAN_OUT:
            return self._straight(shares, payload, gather)
        # An agent is once in a tree.
        once = {share[0]: share for share in reversed(shares)}
        gone = self._straight([share for share in shares if share is not once[share[0]]], payload, gather)
        gone |= {agent for agent in once if not self._process.router.reaches(agent)}
        for part in branches([share for agent, share in once.items() if agent not in gone], FAN_OUT):
            token = next(self._tokens)
            self.kept[token] = _Kept(part, payload)
            self._note(part if gather else part[:1])
            agent, receivers, below = tree(part, FAN_OUT)
            head = (SPREAD, self._process.address, token, gather, receivers, below)
            try:
                sent = self._process.router.send(agent, head, payload)
            except BaseException:
                self.kept.pop(token, None)
                raise
            if not sent:
                gone.add(agent)
                gone |= self._again(token)
        return gone

    def _straight(self, shares: Sequence[Share], payload: Payload, gather: bool) -> set[str]:
        self._note(shares)
        router, here = self._process.router, self._process.address
        return {
            agent
            for agent, receivers in shares
            if not router.send(agent, (SPREAD, here, None, gather, receivers, ()), payload)
        }

    def _note(self, shares: Sequence[Share]) -> None:
        for agent, receivers in shares:
            self.sent_through.setdefault(agent, set()).update(address for address, _, _ in receivers)

    def _again(self, token: int) -> set[str]:
        """Send to all of a branch what some of it may not have."""
        kept = self.kept.pop(token, None)
        # A process that has got it answers by way of the agent; one that gets it only now answers straight.
        return set() if kept is None else self._straight(kept.shares, kept.payload, False)

    def through(self, agent: str) -> Iterable[str]:
        """The processes that a message went to by way of an agent: if the agent is not reached, their messages may have
        gaps."""
        return self.sent_through.pop(agent, ())

    def after_answers(self, address: str, told_by: str, task: Callable[[], None]) -> None:
        """Call `task` once the answers that an ended process had sent by way of its agent are here. The agent sent them
        before it reported the end, but to a process that knows the end from another, they may still be on their way."""
        process, host = self._process, host_of(address)
        agent = next((agent for agent in list(self.sent_through) if host_of(agent) == host), None)
        if agent is None or agent == told_by or not process.ports.expects(address):
            task()
            return
        asked: One[None] = One(agent)
        port = process.ports.open(asked)
        asked.future.when_done(task)
        if not process.router.send(agent, (READY, (process.address, port, 0)), EMPTY):
            process.ports.reply(port, 0, True, lambda: None)

    def lost(self, address: str) -> None:
        """A process has ended, or cannot be reached."""
        for receivers in list(self.sent_through.values()):
            receivers.discard(address)
        self.sent_through.pop(address, None)
        for token, kept in list(self.kept.items()):
            if any(agent == address for agent, _ in kept.shares):
                self._again(token)
        for key, passed in list(self.passed.items()):
            if address in (passed.above, key[0]):
                del self.passed[key]
            elif address in passed.below:
                del self.passed[key]
                self._process.router.send(passed.above, (UNTAKEN, *key), EMPTY)

    def _on_untaken(self, sender: str, head: Head, payload: Payload) -> None:
        _, origin, token = head
        if origin == self._process.address:
            self._again(token)
            return
        passed = self.passed.pop((origin, token), None)
        if passed is not None:
            self._process.router.send(passed.above, head, EMPTY)

    def _on_taken(self, sender: str, head: Head, payload: Payload) -> None:
        _, origin, token = head
        if origin == self._process.address:
            self.kept.pop(token, None)
            return
        passed = self.passed.get((origin, token))
        if passed is not None:
            passed.below.discard(sender)
            if not passed.below:
                del self.passed[origin, token]
                self._process.router.send(passed.above, head, EMPTY)

    # -- an agent's part -----------------------------------------------------------------------------------------------

    def _on_spread(self, sender: str, head: Head, payload: Payload) -> None:
        _, origin, token, gather, receivers, below = head
        send = self._process.router.send
        if below:
            self.passed[origin, token] = _Passed(sender, {agent for agent, _, _ in below})
        for agent, its, further in below:
            if not send(agent, (SPREAD, origin, token, gather, its, further), payload):
                self.passed.pop((origin, token), None)
                send(sender, (UNTAKEN, origin, token), EMPTY)
                break
        self._spread(origin, receivers, payload, gather)
        if token is not None and not below:
            send(sender, (TAKEN, origin, token), EMPTY)

    def _spread(self, origin: str, receivers: Receivers, payload: Payload, gather: bool) -> None:
        process = self._process
        gathered: Gathered | None = None
        port = -1
        if gather:
            address, asked, _ = receivers[0][2][2]
            gathered = Gathered(process, address, asked, {inner[2][2]: to for to, _, inner in receivers})
            port = process.ports.open(gathered)
            self._young.append(gathered)
            if len(self._young) == 1:
                self._later()
        for to, number, inner in receivers:
            if gathered is not None:
                inner = (*inner[:2], (process.address, port, inner[2][2]), *inner[3:])
            sent = process.router.send(to, (RELAY, to, origin, (NUMBERED, number, inner)), payload)
            if not sent:
                process.router.send(origin, (UNREACHED, to), EMPTY)  # who is younger than that end was not told of it
                if gathered is not None and gathered.lost(to, "its process is gone"):
                    process.ports.close(port)

    def _later(self) -> None:
        self._process.router.later(LATE_SECONDS, self._late)

    def _late(self) -> None:
        before = monotonic() - LATE_SECONDS
        for gathered in self._young:
            if gathered.since <= before:
                gathered.wait_no_more()
        self._young = [gathered for gathered in self._young if not gathered.late]
        if self._young:
            self._later()


class Gathered:
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

    def lost(self, address: str, why: str) -> bool:
        """Their answers go out before the report of their end, which the caller gets by itself."""
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
