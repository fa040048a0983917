"""The executor of a part of a mesh: some of its workers, or all of them with other dims."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from monarch.compiler.execution.executor import Bind, Handle, Loss
from monarch.compiler.execution.storage import Stored
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import MeshSpec, Plan, TensorType, Trace
from monarch.runtime.controller.connection import ActorProcesses
from monarch.runtime.controller.replicas import Names
from monarch.runtime.controller.steps import PlanRecord, RemoteTensor, Step
from monarch.runtime.controller.storing import WorkersWriting
from monarch.runtime.shared.place import Place

if TYPE_CHECKING:
    from monarch.runtime.controller.executor import Argument, MeshExecutor


class PartExecutor:
    """`monarch.compiler.plan.Executor` for a part of a mesh. Its commands are the whole mesh's, in one order with all
    others; those that they do not concern pass over them. It starts nothing, and nothing of it has to be closed."""

    def __init__(self, whole: MeshExecutor, shape: Shape) -> None:
        self.whole = whole
        self.place = Place.of(shape)
        self.plans: dict[int, tuple[weakref.ref[Plan], PlanRecord]] = {}
        """The plans that run here and that the workers know, by identity."""

    @property
    def mesh(self) -> MeshSpec:
        return self.place.mesh

    def over(self, shape: Shape) -> MeshExecutor | PartExecutor:
        """Of another part of the whole mesh."""
        return self.whole.over(shape)

    def put(self, tensor: torch.Tensor, type: TensorType, lent: bool = False) -> RemoteTensor:
        return self.whole.put(tensor, type, lent, self)

    def run(
        self, plan: Plan, arguments: Sequence[Argument], bind: Bind | None = None, *, release: Sequence[Handle] = ()
    ) -> list[Handle]:
        return self.whole.run(plan, arguments, bind, self, release=release)

    def settle(self) -> bool:
        return self.whole.settle()

    def give_up(self, handle: Handle | None) -> bool:
        return self.whole.give_up(handle, self)

    def shards(
        self, handle: Handle, workers: Sequence[int] | None = None, *, quiet: bool = False
    ) -> list[torch.Tensor]:
        return self.whole.shards(handle, workers, self, quiet=quiet)

    def wait(self, handle: Handle) -> None:
        self.whole.wait(handle, self)

    def recover(self, handle: Handle, wait: bool = True) -> RemoteTensor:
        return self.whole.recover(handle, wait, self)

    def undo(self) -> None:
        self.whole.undo(self)

    def heal(self, states: Sequence[tuple[str, Handle]], give_up: bool = False, elsewhere: str = "") -> bool:
        return self.whole.heal(states, give_up, elsewhere)

    def snapshots(self, every: int, copies: int) -> None:
        self.whole.snapshots(every, copies)

    def check_replicas(self, every: int | None, names: Names) -> None:
        self.whole.check_replicas(every, names)

    def loss(self, states: Sequence[tuple[str, Handle]]) -> Loss | None:
        return self.whole.loss(states)

    def live(self) -> list[Handle]:
        return self.whole.live(self)

    def placed(self, handle: Handle) -> bool:
        return self.whole.placed(handle)

    def take_hosts(self, shape: Shape) -> bool:
        return self.whole.take_hosts(shape)

    def spread(self, handles: Sequence[Handle], shape: Shape) -> None:
        self.whole.spread(handles, shape)

    def carry(self, handle: Handle, shape: Shape, type: TensorType) -> None:
        self.whole.carry(handle, shape, type)

    def move(self, pairs: Sequence[tuple[Handle, Handle]], shape: Shape, bind: Callable[[], None]) -> None:
        self.whole.move(pairs, shape, bind, self)

    def trace_start(self) -> None:
        self.whole.trace_start()

    def trace_stop(self) -> Trace:
        return self.whole.trace_stop()

    def writing(self) -> WorkersWriting:
        return self.whole.writing(self)

    def read(self, tensors: Sequence[tuple[TensorType, str, Sequence[Stored]]]) -> list[Handle]:
        return self.whole.read(tensors, self)

    def close(self) -> None:
        """The workers are the whole mesh's."""

    def worker_pids(self) -> list[int]:
        """The process ids of the part's workers, in order."""
        pids = self.whole.worker_pids()
        return [pids[rank] for rank in self.place.ranks]

    def inject(self, number: int, *fault: int) -> Step:
        """`MeshExecutor.inject` for one of the part's workers."""
        return self.whole.inject(self.place.ranks[number], *fault)

    # -- actors in the workers' processes --------------------------------------------------------------------------

    @cached_property
    def actor_processes(self) -> ActorProcesses | None:
        """The processes in which the part's workers are, where these are processes of actors."""
        known = self.whole.actor_processes
        if known is None:
            return None
        return ActorProcesses(known.name, tuple([known.processes[rank] for rank in self.place.ranks]), known.owner)

    def number(self) -> int:
        return self.whole.number()

    def owned(self, handle: Handle, what: str) -> RemoteTensor:
        return self.whole.owned(handle, what, self)

    def lend(self, number: int, values: Sequence[RemoteTensor], messages: Sequence[int]) -> None:
        of_rank = dict(zip(self.place.ranks, messages, strict=True))
        self.whole.lend(number, values, [of_rank.get(rank, 0) for rank in self.whole.place.ranks])

    def adopt(self, number: int, types: Sequence[TensorType]) -> list[Handle]:
        return self.whole.adopt(number, types, self)
