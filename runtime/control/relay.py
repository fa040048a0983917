"""Passing records on, in the controller and in every host: a state machine without I/O or clock.

The hosts 0 to n - 1 are attached as a tree. Each end of a tree's edge knows the other by the numbers beneath it, which
are without gaps: the controller has 0 to n - 1 beneath it, splits them evenly among at most `fan_out` children, and a
child is the first host of its numbers and has the others beneath it, which it splits in the same way.

    down   a message goes once to each child that has a host beneath it that the message is for
    up     messages, losses and what hosts say of themselves are passed on; of progress only the least of all, when that
           has grown

    PARENT    above: another host or the controller; in the controller itself, whoever asked for the mesh
    SERVICE   the host's own
    0, 1, ... children, in the order in which they were first called

The controller may attach further hosts, one at a time, when the first ones have answered: each is a child of its own,
with the next number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from monarch.runtime.control import limits
from monarch.runtime.control.records import (
    Attach,
    Attached,
    Forget,
    HostInfo,
    HostPart,
    Lost,
    Malformed,
    Progress,
    Ranges,
    Record,
    Start,
    ranges,
)
from monarch.runtime.shared.tree import split

PARENT, SERVICE = -1, -2


@dataclass(frozen=True, slots=True)
class Send:
    """Pass the record on."""

    to: int
    record: Record


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a stream to `attach.addresses[0]`, send it the record, and know it as `child` from now on."""

    child: int
    attach: Attach


@dataclass(frozen=True, slots=True)
class Drop:
    """End the stream to a child that broke the protocol."""

    child: int
    reason: str


@dataclass(frozen=True, slots=True)
class Down:
    """From the parent."""

    record: Record


@dataclass(frozen=True, slots=True)
class Up:
    """From a child, or from the host's own service."""

    source: int
    record: Record


@dataclass(frozen=True, slots=True)
class Ready:
    """The host's service has been made."""

    info: HostInfo


@dataclass(frozen=True, slots=True)
class Gone:
    """A child's stream has ended, or it could not be opened; or the host's service has failed."""

    source: int
    reason: str


Event = Down | Up | Ready | Gone
Action = Send | Dial | Drop


@dataclass
class _Child:
    start: int
    stop: int
    addresses: tuple[str, ...]
    alive: bool = True
    unheard: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


@dataclass
class _Progress:
    latest: dict[int, tuple[int, ...]] = field(default_factory=dict)
    said: tuple[int, ...] = ()


class Relay:
    """One for each controller that has attached a host, and one in the controller itself (`controller`)."""

    def __init__(self, controller: bool = False) -> None:
        self._controller = controller
        self._attach: Attach | None = None
        self._children: list[_Child] = []
        self._attached = self._said = False  # whether those of the last request have answered, or those of any
        self._infos: list[HostInfo] = []
        self._failures: list[tuple[int, str]] = []
        self._service = False
        self._told = controller  # whether the host's own service runs, or why not
        self._open: dict[int, tuple[tuple[int, ...], int]] = {}
        self._members: dict[int, set[int]] = {}
        self._progress: dict[tuple[int, str], _Progress] = {}

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Down(record):
                return self._down(record)
            case Up(source, record):
                try:
                    return self._up(source, record)
                except Malformed as error:
                    if source == SERVICE:
                        raise
                    return [Drop(source, str(error))]
            case Ready(info):
                self._infos.append(info)
                self._service = self._told = True
                return self._answer()
            case Gone(source, reason):
                return self._gone(source, reason)

    @property
    def alive(self) -> bool:
        """Whether anybody beneath can still be reached."""
        return any(child.alive for child in self._children)

    # -- down ------------------------------------------------------------------------------------------------------

    def _down(self, record: Record) -> list[Action]:
        match record:
            case Attach():
                if self._attach is not None and not self._controller:
                    raise Malformed("it was attached already")
                self._attach, self._attached = record, False
                self._infos.clear()
                self._failures.clear()
                first = 0 if self._controller else 1
                return self._call(record.number + first, record.addresses[first:])
            case Start():
                return self._start(record)
            case HostPart():
                return self._part(record)
            case Forget(mesh):
                self._members.pop(mesh, None)
                for key in [key for key in self._progress if key[0] == mesh]:
                    del self._progress[key]
                return [Send(child, record) for child, state in enumerate(self._children) if state.alive]
            case _:
                raise Malformed(f"a {type(record).__name__} does not come from above")

    def _start(self, record: Start) -> list[Action]:
        if self._attach is None:
            raise Malformed("a message came before anything was attached")
        if record.mesh in self._open:
            raise Malformed(f"a message of mesh {record.mesh} begins before the last one's end")
        to = self._targets(record.targets)
        members = self._members.setdefault(record.mesh, set())
        if not members.issuperset(to):
            members.update(to)
        self._note(record.mesh, to, record.size - len(record.data))
        return [Send(each, record) for each in to if self._reachable(each)]

    def _part(self, record: HostPart) -> list[Action]:
        if record.mesh not in self._open:
            raise Malformed(f"a part of mesh {record.mesh} belongs to no message")
        to, left = self._open.pop(record.mesh)
        self._note(record.mesh, to, left - len(record.data))
        return [Send(each, record) for each in to if self._reachable(each)]

    def _note(self, mesh: int, to: tuple[int, ...], left: int) -> None:
        if left < 0:
            raise Malformed(f"a message of mesh {mesh} has more parts than it announced")
        if left:
            self._open[mesh] = (to, left)

    def _targets(self, targets: Ranges | None) -> tuple[int, ...]:
        """The children (and the service) that a message is for."""
        assert self._attach is not None
        own = self._attach.number
        everyone: list[int] = [] if self._controller else [SERVICE]
        if targets is None:
            return (*everyone, *self._joined())
        here = [SERVICE] if everyone and _overlap(targets, own, own + 1) else []
        return (*here, *(at for at in self._joined() if _overlap(targets, *self._bounds(at))))

    def _joined(self) -> list[int]:
        """The children that have joined, without those that were to and did not."""
        return [at for at, child in enumerate(self._children) if child.start < child.stop]

    def _reachable(self, to: int) -> bool:
        return self._service if to == SERVICE else self._children[to].alive

    # -- attaching -------------------------------------------------------------------------------------------------

    def _call(self, number: int, addresses: Sequence[str]) -> list[Action]:
        """Attach hosts as children: the first of each piece with the others of it beneath."""
        assert self._attach is not None
        actions: list[Action] = []
        for start, stop in split(len(addresses), self._attach.fan_out):
            piece = tuple(addresses[start:stop])
            attach = replace(self._attach, number=number + start, addresses=piece)
            self._children.append(
                _Child(attach.number, attach.stop, piece, unheard=set(range(attach.number, attach.stop)))
            )
            actions.append(Dial(len(self._children) - 1, attach))
        return actions or self._answer()

    def _answer(self) -> list[Action]:
        """Tell how attaching went, once all have answered."""
        if self._attached or not self._told:
            return []
        if not all(not child.unheard or not child.alive for child in self._children):
            return []
        self._attached = self._said = True
        infos = sorted(self._infos, key=lambda info: info.number)
        failures = sorted(self._failures)
        most = limits.HOSTS_A_RECORD
        return [
            *(Send(PARENT, Attached(tuple(infos[at : at + most]))) for at in range(0, len(infos), most)),
            *(Send(PARENT, Attached((), tuple(failures[at : at + most]))) for at in range(0, len(failures), most)),
        ]

    # -- up --------------------------------------------------------------------------------------------------------

    def _up(self, source: int, record: Record) -> list[Action]:
        match record:
            case Start(host=host) | HostPart(host=host):
                self._check(source, host, host + 1)
                return [Send(PARENT, record)]
            case Progress():
                return self._combine(source, record)
            case Lost(start, stop) if source != SERVICE:
                self._check(source, start, stop)
                self._children[source].lost.update(range(start, stop))
                return [Send(PARENT, record)]
            case Attached(hosts, failures) if source != SERVICE:
                child = self._children[source]
                for number in [host.number for host in hosts] + [number for number, _ in failures]:
                    if number not in child.unheard:
                        raise Malformed(f"it tells that host {number} is attached, or not, and was not asked to")
                    child.unheard.discard(number)
                self._infos += hosts
                self._failures += failures
                return self._answer()
            case _:
                raise Malformed(f"a {type(record).__name__} does not come from below")

    def _check(self, source: int, start: int, stop: int) -> None:
        assert self._attach is not None
        own = self._attach.number
        low, high = (own, own + 1) if source == SERVICE else self._bounds(source)
        if not low <= start < stop <= high:
            raise Malformed(f"the hosts {low} to {high - 1} speak as host {start}")

    def _bounds(self, child: int) -> tuple[int, int]:
        return self._children[child].start, self._children[child].stop

    def _combine(self, source: int, record: Progress) -> list[Action]:
        members = self._members.get(record.mesh, set())
        if source not in members:
            return []  # of a mesh that nobody asks for any more
        state = self._progress.setdefault((record.mesh, record.kind), _Progress())
        for known in (state.said, *state.latest.values()):
            if known and len(known) != len(record.numbers):
                numbers = f"{len(record.numbers)} numbers, not {len(known)}"
                raise Malformed(f"progress '{record.kind}' of mesh {record.mesh} has {numbers}")
        state.latest[source] = record.numbers
        if len(state.latest) < len(members):
            return []
        least = tuple(map(min, *state.latest.values())) if len(state.latest) > 1 else record.numbers
        grown = tuple(map(max, least, state.said)) if state.said else least
        if grown == state.said:
            return []
        state.said = grown
        return [Send(PARENT, Progress(record.kind, record.mesh, grown))]

    # -- losses ----------------------------------------------------------------------------------------------------

    def _gone(self, source: int, reason: str) -> list[Action]:
        """The progress that a lost host has reported stays as it is: nothing may pass for done that it has not done."""
        assert self._attach is not None
        if source == SERVICE:
            return self._service_gone(reason)
        child = self._children[source]
        if not child.alive:
            return []
        child.alive = False
        if self._controller and child.unheard and self._said:
            # A host that was to join later: its number is the next one's.
            self._failures = [(child.start, reason)]
            child.stop, child.unheard = child.start, set()
            return self._answer()
        if child.unheard:
            # Its reports about the others do not count. The controller calls these from here, so that it finds all that
            # cannot be reached at once.
            mine = range(child.start, child.stop)
            self._infos = [info for info in self._infos if info.number not in mine]
            self._failures = [each for each in self._failures if each[0] not in mine] + [(child.start, reason)]
            return self._call(child.start + 1, child.addresses[1:])
        actions: list[Action] = []
        if child.start not in child.lost:
            actions.append(Send(PARENT, Lost(child.start, child.start + 1, reason)))
        beneath = f"it was reached over {child.addresses[0]}, which is lost: {reason}"
        left = [host for host in range(child.start + 1, child.stop) if host not in child.lost]
        return actions + [Send(PARENT, Lost(start, stop, beneath)) for start, stop in ranges(left)]

    def _service_gone(self, reason: str) -> list[Action]:
        assert self._attach is not None
        own = self._attach.number
        if self._service:
            self._service = False
            return [Send(PARENT, Lost(own, own + 1, reason))]
        self._failures.append((own, reason))
        self._told = True
        return self._answer()


def _overlap(targets: Ranges, start: int, stop: int) -> bool:
    return any(low < stop and start < high for low, high in targets)
