"""Shards: the results of an endpoint in each process, which stay there to become a distributed tensor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch.compiler.execution.executor import Executor, Handle
from monarch.compiler.plan import MonarchError, TensorType
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.controller.connection import ActorProcesses
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.parts import PartExecutor
from monarch.runtime.future import Future

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.programs import Programs

T = TypeVar("T", covariant=True)


class Shards(Generic[T]):
    """The replies to a call, which stay in the processes of the actors: `mesh.from_shards(shards, "[@data, -]")`.

    They are kept until then, or until this object goes.
    """

    def __init__(
        self,
        programs: Programs,
        number: int,
        label: str,
        addresses: Sequence[str],
        replies: Future[ValueMesh[Any]],
    ) -> None:
        """`replies` are the results, with a TensorType for each tensor."""
        self._number = number
        self._label = label
        self._addresses = addresses
        self._replies = replies
        self._drop = weakref.finalize(self, programs.drop, number, addresses)
        self._drop.atexit = False

    def done(self) -> bool:
        """Whether all have returned, or one has failed."""
        return self._replies.done()

    def wait(self, timeout: float | None = None) -> Shards[T]:
        """Wait until all have returned, at most `timeout` seconds. Raises what `Future.get` of a call raises."""
        self._replies.get(timeout)
        return self

    def found(self, executor: Executor) -> list[Any]:
        """The results of each process, for `Mesh.from_shards` (see `monarch.compiler.plan.Returned`). MonarchError
        where a mesh has the shards already, and where the call was in other processes than those of the mesh."""
        if not self._drop.alive:
            raise MonarchError(
                f"what '{self._label}' returned is on a mesh already", hint="use the tensors that were made of it."
            )
        replies = dict(zip(self._addresses, self._replies.get().values(), strict=True))
        processes = _in_actors(executor)[1].processes
        if set(replies) != set(processes):
            inside = sum(process in replies for process in processes)
            others = f", and in {len(replies) - inside} others" if len(replies) > inside else ""
            raise MonarchError(
                f"'{self._label}' was called in {inside} of the {len(processes)} processes of {executor.mesh}{others}",
                hint="call actors that are in the mesh's processes, one in each: Mesh(procs=procs) and "
                "procs.spawn(...).",
            )
        return [replies[process] for process in processes]

    def adopt(self, executor: Executor, types: Sequence[TensorType]) -> list[Handle]:
        """The shards, as values of the mesh (see `monarch.compiler.plan.Returned`)."""
        handles = _in_actors(executor)[0].adopt(self._number, types)
        self._drop.detach()
        return handles

    def __repr__(self) -> str:
        return f"<shards of {self._label} in {len(self._addresses)} processes>"


def _in_actors(executor: Executor) -> tuple[MeshExecutor | PartExecutor, ActorProcesses]:
    processes: ActorProcesses | None = getattr(executor, "actor_processes", None)
    if processes is None:
        raise MonarchError(
            f"the workers of {executor.mesh} are not in the processes of actors",
            hint="make the mesh on them: Mesh(procs=procs).",
        )
    assert isinstance(executor, (MeshExecutor, PartExecutor))
    return executor, processes
