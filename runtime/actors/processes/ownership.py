"""Supervision: which actor owns which meshes, what ends with its owner, and which owner gets a failure. Pure: events
in, commands out.

Each process has one, which knows the actors that live there and the meshes, of actors or of processes, that these own;
what they own may live anywhere. An actor is owned by the actor that spawned it. What a process spawned outside of its
actors is owned by the process itself, as actor ""; in the first process that is the user's program.

    an actor ends       what it owns is stopped; once all that has ended its `__cleanup__` runs; then its owner hears
    an actor fails      the same, and what its owner hears is a failure
    a process ends      each owner of something there hears; what was owned from there is stopped, wherever it is
    an owner hears      of a failure: its `__supervise__` runs. True: that was all. Else the owner itself fails, of that
    a process hears     of a failure, as actor "": nobody here is left to deal with it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch.runtime.actors.errors import MeshFailure
from monarch.runtime.actors.messages.recent import Recent

Ref = tuple[str, str]
"""An actor anywhere: the address of its process, and its name there, of which there is one only."""

PROCESS = ""
"""The name of the process itself among its actors."""


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Born:
    """An actor lives here now: place `rank` of a mesh, spawned by `owner`."""

    actor: str
    owner: Ref
    mesh: str
    name: str
    rank: int


@dataclass(frozen=True)
class Owns:
    """An actor here spawned a mesh, whose places are at these addresses: of actors, or of `processes` themselves."""

    owner: str
    mesh: str
    name: str
    places: Sequence[str]
    processes: bool = False


@dataclass(frozen=True)
class Ends:
    """An actor here runs no message any more, and will take none: it was stopped, or it failed."""

    actor: str
    reason: str
    failed: bool


@dataclass(frozen=True)
class Cleaned:
    """An actor's `__cleanup__` is through; `error` is its error, if it raised."""

    actor: str
    error: str = ""


@dataclass(frozen=True)
class Supervised:
    """The outcome of a failure that an actor here got; `error` is the error of its `__supervise__`, if it raised."""

    actor: str
    failure: MeshFailure
    handled: bool
    error: str = ""


@dataclass(frozen=True)
class PlaceEnded:
    """A place of a mesh of actors has ended, all that it owned before it: it was stopped, or had a failure."""

    mesh: str
    rank: int
    failure: MeshFailure | None = None


@dataclass(frozen=True)
class ProcessGone:
    """A process has ended: it was stopped, or it `failed`."""

    address: str
    reason: str
    failed: bool
    status: int | None = None
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class EndProcess:
    """All actors here are to end, for the process is to."""

    reason: str


Event = Born | Owns | Ends | Cleaned | Supervised | PlaceEnded | ProcessGone | EndProcess


# -- commands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Supervise:
    """Tell an actor here, before its next message: `Supervised` is to follow. To the program: its last resort."""

    actor: str
    failure: MeshFailure


@dataclass(frozen=True)
class StopActor:
    """Stop an actor here, when it has handled the messages so far: `Ends` is to follow, now or then."""

    actor: str
    reason: str


@dataclass(frozen=True)
class StopMesh:
    """Have these places of a mesh stopped, wherever they are."""

    mesh: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Cleanup:
    """Run an actor's `__cleanup__`: `Cleaned` is to follow. `failure` is the cause of its death, "" if it was
    stopped."""

    actor: str
    failure: str


@dataclass(frozen=True)
class Bury:
    """An actor has ended, and its owner knows: answer the calls that wait for its end, and the messages that still come
    for it, with this reason."""

    actor: str
    reason: str


@dataclass(frozen=True)
class Tell:
    """Tell an owner, here or elsewhere."""

    owner: Ref
    event: PlaceEnded


@dataclass(frozen=True)
class Exit:
    """Nothing lives here any more, and the process was to end."""


Command = Supervise | StopActor | StopMesh | Cleanup | Bury | Tell | Exit


# -- state -------------------------------------------------------------------------------------------------------------


@dataclass
class _Mesh:
    name: str
    places: dict[int, str]  # those that have not ended
    processes: bool


@dataclass
class _Actor:
    owner: Ref | None = None  # the process itself has none
    mesh: str = ""
    name: str = ""
    rank: int = 0
    owned: dict[str, _Mesh] = field(default_factory=dict)
    told: list[MeshFailure] = field(default_factory=list)  # of which it has not said what came of them
    ending: bool = False
    cleaning: bool = False
    reason: str = ""
    failure: MeshFailure | None = None  # why it ends, unless it was just stopped

    def failed(self, reason: str, cause: MeshFailure | None = None) -> MeshFailure:
        return MeshFailure(self.mesh, self.name, self.rank, reason, cause=cause)

    def __str__(self) -> str:
        return f"{self.name}[{self.rank}]" if self.owner else "the process"


class Supervision:
    """The state of one process. `owner` is the address of the process whose end ends this one, if there is one."""

    def __init__(self, owner: str | None = None) -> None:
        self._owner = owner
        self._actors: dict[str, _Actor] = {PROCESS: _Actor()}
        self._gone: Recent[str, ProcessGone] = Recent()
        self._exiting = ""

    def handle(self, event: Event) -> list[Command]:
        match event:
            case Born():
                return self._born(event)
            case Owns():
                return self._owns(event)
            case Ends(actor, reason, failed):
                return self._ends(actor, reason, failed)
            case Cleaned(actor, error):
                return self._cleaned(actor, error)
            case Supervised():
                return self._supervised(event)
            case PlaceEnded(mesh, rank, failure):
                return self._place_ended(mesh, rank, failure)
            case ProcessGone():
                return self._process_gone(event)
            case EndProcess(reason):
                return self._end_process(reason)

    def owner_of(self, mesh: str) -> str | None:
        """The actor here that owns a mesh of which something lives still."""
        return next((who for who, actor in self._actors.items() if mesh in actor.owned), None)

    def owned_in(self, actor: str) -> set[str]:
        """The addresses of the meshes' places that an actor here owns and that have not ended."""
        owner = self._actors.get(actor)
        meshes = [] if owner is None else list(owner.owned.values())
        return {address for mesh in meshes for address in mesh.places.values()}

    def _born(self, event: Born) -> list[Command]:
        self._actors[event.actor] = _Actor(event.owner, event.mesh, event.name, event.rank)
        if self._exiting:
            return [StopActor(event.actor, self._exiting)]
        if event.owner[0] in self._gone:
            return [StopActor(event.actor, _orphaned(self._gone[event.owner[0]]))]
        return []

    def _owns(self, event: Owns) -> list[Command]:
        owner = self._actors.get(event.owner)
        if owner is None or owner.cleaning:
            reason = f"the actor that spawned '{event.name}' has ended"
            return [StopMesh(event.mesh, tuple(range(len(event.places))), reason)]
        mesh = owner.owned[event.mesh] = _Mesh(event.name, dict(enumerate(event.places)), event.processes)
        commands: list[Command] = []
        for address in dict.fromkeys(event.places):
            if address in self._gone:
                commands += self._lose(event.owner, [event.mesh], self._gone[address])
        if owner.ending and mesh.places:
            commands.append(StopMesh(event.mesh, tuple(mesh.places), f"its owner {owner} has ended: {owner.reason}"))
        return commands

    # -- an actor's end ------------------------------------------------------------------------------------------------

    def _ends(self, who: str, reason: str, failed: bool) -> list[Command]:
        actor = self._actors.get(who)
        if actor is None or actor.ending:
            return []
        actor.ending = True
        actor.reason = reason
        if failed and actor.failure is None:
            actor.failure = actor.failed(reason)
        stops: list[Command] = [
            StopMesh(mesh, tuple(owned.places), f"its owner {actor} has ended: {reason}")
            for mesh, owned in reversed(actor.owned.items())
        ]
        return stops + self._clean_if_alone(who, actor)

    def _clean_if_alone(self, who: str, actor: _Actor) -> list[Command]:
        if not actor.ending or actor.cleaning or actor.owned:
            return []
        actor.cleaning = True
        if who == PROCESS:
            return self._exit_if_empty()
        return [Cleanup(who, actor.failure.report() if actor.failure else "")]

    def _cleaned(self, who: str, error: str) -> list[Command]:
        actor = self._actors.get(who)
        if actor is None or not actor.cleaning:
            return []
        del self._actors[who]
        if error:
            actor.failure = actor.failed(f"its __cleanup__ raised {error}", cause=actor.failure)
        elif actor.failure is None and actor.told:  # failures that came while it was ending
            actor.failure = actor.failed(_unhandled(actor.told[0]), cause=actor.told[0])
        commands: list[Command] = []
        if actor.owner is not None and actor.owner[0] not in self._gone:
            commands.append(Tell(actor.owner, PlaceEnded(actor.mesh, actor.rank, actor.failure)))
        commands.append(Bury(who, actor.failure.report() if actor.failure else actor.reason))
        return commands + self._exit_if_empty()

    def _end_process(self, reason: str) -> list[Command]:
        if self._exiting:
            return []
        self._exiting = reason
        commands: list[Command] = [
            StopActor(who, reason) for who, actor in self._actors.items() if who != PROCESS and not actor.ending
        ]
        return commands + self._ends(PROCESS, reason, failed=False)

    def _exit_if_empty(self) -> list[Command]:
        return [Exit()] if self._actors.keys() == {PROCESS} and self._actors[PROCESS].cleaning else []

    # -- failures ------------------------------------------------------------------------------------------------------

    def _hears(self, who: str, failure: MeshFailure) -> list[Command]:
        actor = self._actors[who]
        actor.told.append(failure)
        return [] if actor.ending else [Supervise(who, failure)]

    def _supervised(self, event: Supervised) -> list[Command]:
        actor = self._actors.get(event.actor)
        if actor is None or event.failure not in actor.told:
            return []
        handled = event.handled and not event.error
        if handled or event.actor == PROCESS:
            actor.told.remove(event.failure)
        if handled or event.actor == PROCESS or actor.ending:
            return []
        reason = f"its __supervise__ raised {event.error}" if event.error else _unhandled(event.failure)
        actor.failure = actor.failed(reason, cause=event.failure)
        return self._ends(event.actor, reason, failed=True)

    def _place_ended(self, mesh: str, rank: int, failure: MeshFailure | None) -> list[Command]:
        who = self.owner_of(mesh)
        if who is None or self._actors[who].owned[mesh].places.pop(rank, None) is None:
            return []
        commands: list[Command] = self._hears(who, failure) if failure is not None else []
        return commands + self._forget_if_ended(who, mesh)

    def _forget_if_ended(self, who: str, mesh: str) -> list[Command]:
        actor = self._actors[who]
        if not actor.owned[mesh].places:
            del actor.owned[mesh]
        return self._clean_if_alone(who, actor)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _process_gone(self, event: ProcessGone) -> list[Command]:
        if event.address in self._gone:
            return []
        self._gone[event.address] = event
        commands: list[Command] = []
        for who, actor in list(self._actors.items()):
            meshes = [mesh for mesh, owned in actor.owned.items() if event.address in owned.places.values()]
            commands += self._lose(who, meshes, event)
            if actor.owner is not None and actor.owner[0] == event.address and not actor.ending:
                commands.append(StopActor(who, _orphaned(event)))
        if event.address == self._owner:
            commands += self._end_process(_orphaned(event))
        return commands

    def _lose(self, who: str, meshes: list[str], event: ProcessGone) -> list[Command]:
        """The places that an actor here owned in a process have ended with it. It gets one failure for each of its
        meshes of actors there; for its mesh of processes only where there is none of these."""
        actor = self._actors[who]
        commands: list[Command] = []
        of_actors = [mesh for mesh in meshes if not actor.owned[mesh].processes]
        for mesh in meshes:
            owned = actor.owned[mesh]
            lost = [rank for rank, address in owned.places.items() if address == event.address]
            for rank in lost:
                del owned.places[rank]
            if event.failed and not actor.ending and (mesh in of_actors or not of_actors):
                reason = f"its process ended: {event.reason}"
                commands += self._hears(who, MeshFailure(mesh, owned.name, lost[0], reason, event.status, event.log))
            commands += self._forget_if_ended(who, mesh)
        return commands


def _unhandled(failure: MeshFailure) -> str:
    return f"it did not handle the failure of {failure.mesh_name}"


def _orphaned(event: ProcessGone) -> str:
    return f"the process of its owner has ended: {event.reason}"
