"""Distributed tensors in messages: each receiver has a shard in its process, and gets that, by reference.

Pickling a message notes them. Only when all of it could be pickled do the workers get the command to lend them
(`worker.exchange`), and then the message goes out: so their values are those at the message's place in the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch.compiler.execution.executor import Executor, Handle
from monarch.compiler.plan import MonarchError
from monarch.runtime.controller.connection import ActorProcesses
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.parts import PartExecutor
from monarch.runtime.controller.steps import RemoteTensor
from monarch.runtime.worker.exchange import Reference, take


class Sending:
    """A message that is being pickled, for actors in these processes: `monarch.compiler.plan.Outgoing`."""

    __slots__ = ("_to", "tensors")

    def __init__(self, to: Sequence[str]) -> None:
        self._to = to
        self.tensors: dict[MeshExecutor | PartExecutor, tuple[int, list[RemoteTensor]]] = {}

    def refer(self, executor: Executor, handle: Handle, parameter: bool, requires_grad: bool) -> tuple[Any, ...]:
        processes: ActorProcesses | None = getattr(executor, "actor_processes", None)
        if processes is None:
            raise MonarchError(
                f"{handle.type} is on {executor.mesh}, whose workers are not in the processes of actors",
                hint="make the mesh on these processes, Mesh(procs=procs), and actors there get their shard;\n"
                "or fetch the tensor first: x.full_tensor().",
            )
        assert isinstance(executor, (MeshExecutor, PartExecutor))
        strangers = set(self._to).difference(processes.processes)
        if strangers:
            raise MonarchError(
                f"{handle.type} is sent to {len(self._to)} actors, and {len(strangers)} of them are in processes that "
                f"{executor.mesh} does not run on",
                hint="an actor gets the shard of the worker in its process: slice the actors, or fetch the tensor "
                "first:\nx.full_tensor().",
            )
        if handle.type.padded(executor.mesh).padding:
            raise MonarchError(
                f"{handle.type} on {executor.mesh} has padding, which an actor would get with its shard",
                hint="choose a layout that the mesh divides, x.redistribute(...), or fetch it first: x.full_tensor().",
            )
        token, remotes = self.tensors.setdefault(executor, (executor.number(), []))
        remotes.append(executor.owned(handle, "the tensor that is sent"))
        return take, (processes.name, token, len(remotes) - 1, parameter, requires_grad)

    def lend(self) -> tuple[Reference, ...]:
        """Have the workers lend the tensors of the message. Raises the errors of commands."""
        lent = []
        for executor, (token, remotes) in self.tensors.items():
            assert executor.actor_processes is not None
            executor.lend(token, remotes, [self._to.count(process) for process in executor.actor_processes.processes])
            lent.append((executor.actor_processes.name, token))
        return tuple(lent)
