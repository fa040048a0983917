"""The identity of the running code: `context().actor_instance` for the actor that runs, and for its creator."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from monarch.compiler.mesh import Extent, Point
from monarch.runtime.actors.messages.protocol import Owner

if TYPE_CHECKING:
    from monarch.runtime.actors.actor_mesh import ActorMesh
    from monarch.runtime.actors.meshes import ProcMesh
    from monarch.runtime.actors.processes.process import Process


@dataclass(frozen=True, repr=False)
class Creator:
    """The creator of an actor, as plain data: the attributes are those of `Instance`."""

    actor_id: str
    name: str
    class_name: str | None
    rank: Point
    proc_mesh: ProcMesh
    creator: Creator | None

    def __repr__(self) -> str:
        return f"<actor {self.name}[{self.rank.rank}]>" if self.rank.extent else f"<actor {self.name}>"


class Instance:
    """The value of `context().actor_instance`: the running actor, or, outside actors, the process itself.

    `name`        the one that it was spawned with
    `rank`        its place in the mesh as spawned
    `class_name`  its class, with the module; None outside actors
    `proc_mesh`   the processes that its mesh was spawned in; outside actors this process
    `creator`     the actor, or process, that spawned it; None outside actors
    """

    def __init__(self, process: Process, actor_id: str, name: str) -> None:
        self.actor_id = actor_id
        self.name = name
        self.rank = Point(0, Extent([], []))
        self.mesh: ActorMesh[Any] | None = None
        self._process = process
        self._origin = b""

    def becomes(self, mesh: ActorMesh[Any], rank: int, origin: bytes) -> None:
        """It is the actor at this place of a mesh; `origin` is what `originates` said of its processes and creator."""
        self.mesh, self.rank = mesh, mesh.extent.point_of_rank(rank)
        self._origin = origin

    def originates(self, procs: ProcMesh) -> bytes:
        """The identity that the actors which this one spawns in these processes have of both: pickled, for few of them
        ever ask."""
        me = Creator(self.actor_id, self.name, self.class_name, self.rank, self.proc_mesh, self.creator)
        return pickle.dumps((procs, me))

    def descends_from(self, actor: str) -> bool:
        """Whether an actor has spawned it, or has spawned its creator, and so on."""
        creator = self.creator
        while creator is not None and creator.actor_id != actor:
            creator = creator.creator
        return creator is not None

    @cached_property
    def _read(self) -> tuple[ProcMesh, Creator | None]:
        return pickle.loads(self._origin) if self._origin else (self._process.this_proc(), None)

    @property
    def label(self) -> str:
        return self.name if self.mesh is None or not self.mesh.extent else f"{self.name}[{self.rank.rank}]"

    @property
    def class_name(self) -> str | None:
        cls = None if self.mesh is None else self.mesh._cls
        return None if cls is None else f"{cls.__module__}.{cls.__qualname__}"

    @property
    def proc(self) -> ProcMesh:
        """The process that it runs in."""
        return self._process.this_proc()

    @property
    def proc_mesh(self) -> ProcMesh:
        return self._read[0]

    @property
    def creator(self) -> Creator | None:
        return self._read[1]

    @property
    def owner(self) -> Owner:
        return self._process.address, self.actor_id

    def stop(self, reason: str | None = None) -> None:
        """Have this actor end, once it has handled the messages that are there. Raises RuntimeError outside actors."""
        if (actor := self._process.actor_of(self)) is not None:
            actor.stop(reason or "it stopped itself", None)

    def abort(self, reason: str | None = None) -> None:
        """Have this actor fail, now: its owner gets the failure, and the meshes that it owns end.

        An `async def` endpoint that runs is cancelled where it awaits; one with `def` runs to its end. Its caller gets
        SupervisionError either way. From any thread. Raises RuntimeError outside actors.
        """
        if (actor := self._process.actor_of(self)) is not None:
            actor.abort(f"it aborted itself: {reason}" if reason else "it aborted itself")

    def __repr__(self) -> str:
        return f"<actor {self.label}>"
