"""The Protocol between the code that programs are written with (`language`) and the one that runs them (`runtime`),
which never import each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from monarch.compiler.execution.storage import Piece, Stored, Written
from monarch.compiler.mesh import Shape
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.trace import Trace
from monarch.compiler.types import MeshSpec, TensorType


class Hosts(Protocol):
    """Machines on which the workers of meshes run."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """How each is reached; of this machine alone, one that is empty."""

    def start(self, mesh: MeshSpec) -> Executor:
        """Start a worker for each place of `mesh`: equal blocks of them, in order, on each host. Raises
        MonarchError."""

    def close(self) -> None:
        """Detach the hosts, which end what runs on them for this process. Idempotent."""


class Procs(Protocol):
    """Processes of actors, on which workers of meshes run too."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def start(self, mesh: MeshSpec) -> Executor:
        """Start a worker in each, in order. Raises MonarchError."""


class Handle(Protocol):
    """A tensor that lives (or will live) on a mesh's workers. Dropping the last reference frees it there."""

    @property
    def type(self) -> TensorType: ...


Undo = Callable[[], None]
"""Undoes something. To call it again changes nothing."""
TakeBack = Callable[[bool], None]
"""Undoes a failed step's changes of Python; of one that was dropped, which is to be called again (True), also changes
that PyTorch would not undo: random numbers are drawn again. To call it again changes nothing."""
Bind = Callable[[list[Handle]], TakeBack | None]
"""See `Executor.run`."""


class Writing(Protocol):
    """A save that the workers of a mesh write, beside the steps that they run. Its owner ends it, also where `start`
    was interrupted."""

    def start(self, values: Sequence[tuple[Handle, Sequence[Piece]]]) -> None:
        """Have the workers write values, as they are now, while they run the steps that follow."""

    def belongs_to(self, thread: threading.Thread) -> None:
        """Say which thread ends it: while that runs, closing the mesh waits for it."""

    def poll(self) -> Written:
        """How far they are: waits until they have come to this question, behind the steps that were called before it.
        Raises DeviceMeshError where a worker cannot write, or the mesh is lost."""

    def ahead(self) -> int:
        """How many commands the workers have been given and have not run yet. Waits for nothing."""

    def end(self) -> None:
        """Have the workers forget it, and wait until they write no more of it, unless the mesh is lost or closed. Files
        that are written stay. Raises nothing but interrupts; to call it again changes nothing. The mesh is closed only
        behind it."""


@runtime_checkable
class Executor(Protocol):
    """Runs plans for one mesh. All calls but `shards` and `wait` return at once; a failure of the work behind them
    raises DeviceMeshError where a handle that depends on it is waited for."""

    @property
    def mesh(self) -> MeshSpec: ...

    @property
    def whole(self) -> Executor:
        """The executor of the mesh that was started, where this is that of a part; itself otherwise."""

    def over(self, shape: Shape) -> Executor:
        """The executor of some of the started mesh's workers, with these dims, which runs plans for a mesh of that
        shape: the same one each time. A handle is for the executor that gave it."""

    def put(self, tensor: torch.Tensor, type: TensorType, lent: bool = False) -> Handle:
        """Place a tensor of the controller's on the mesh: each worker gets the block that `type` gives it. One that is
        `lent` is not copied here, but read until all workers have it: nobody may write to it from now on."""

    def run(
        self,
        plan: Plan,
        arguments: Sequence[Handle | torch.Tensor | float | int],
        bind: Bind | None = None,
        *,
        release: Sequence[Handle] = (),
    ) -> list[Handle]:
        """Run one step. `arguments` are in the order of `plan.inputs`: a handle of exactly the type that the plan
        names, a plain tensor of the global shape (inputs only; split as `put` does), or a number for a scalar or a
        seed. Gives a handle for each of `plan.outputs`. Donated handles must not be used afterwards.

        `bind` puts these handles where they belong. It is called once the step is certain to run, also if this call is
        interrupted then (at the latest by `settle`); it may be called twice. It returns a function that undoes its
        changes of Python, should the step fail (see `undo`): it is kept until the step is known to have worked.

        `release` are handles that the step does not read and that nobody uses once it is given: the workers free them
        before they run it. Where this call refuses the step, they are as before."""

    def settle(self) -> bool:
        """Call the `bind` functions that remain: before handles are read, in case a call was interrupted, or a signal's
        handler runs in the middle of one. Whether steps were given up since the last time, because a wait for them was
        interrupted: then call `undo` and `recover`."""

    def give_up(self, handle: Handle | None) -> bool:
        """A wait for this value was interrupted: have the workers give up the step that makes it and all steps behind
        it, unless they have come to its commit; without a value, all steps. See `settle`. Waits for a second at most;
        whether nothing is under way then that `settle` would wait for."""

    def shards(
        self, handle: Handle, workers: Sequence[int] | None = None, *, quiet: bool = False
    ) -> list[torch.Tensor]:
        """Wait for each worker's block of the value (of all workers, or those listed by rank), and fetch it. A failure
        raised by a `quiet` call does not count as reported: `heal` gives the failed step again."""

    def worker_pids(self) -> list[int]:
        """The workers' process ids on their hosts, by rank, once all have started."""

    def wait(self, handle: Handle) -> None:
        """Wait until every worker has finished the step that makes the value, which may be on a part of the mesh; raise
        what went wrong there."""

    def recover(self, handle: Handle, wait: bool = True) -> Handle:
        """For a state that a failed step was to make: its newest value that there is, which is that of the last step
        that committed (where that is lost, reading the handle raises LostError); `handle` itself where nothing failed,
        or (without waiting) is known to have. Raises DeviceMeshError where nothing is left."""

    def undo(self) -> None:
        """Undo what failed steps' `bind` did to Python, the newest first. Waits for all steps; raises DeviceMeshError
        where the mesh is lost."""

    def heal(self, states: Sequence[tuple[str, Handle]], give_up: bool = False, elsewhere: str = "") -> bool:
        """Where the mesh has lost workers, start others in their places, and have all be as if every step had been
        called but the first that was reported as failed, and those behind it: their handles raise DeviceMeshError.
        Waits for that. `states` are values without which the mesh is of no use, with their names.

        Raises LostError where one of these is lost, and MonarchError where the workers cannot be started. With
        `give_up` the mesh is healed without what is lost, and no step is called again that had not ended: True then,
        for all state is to go back to one time. `elsewhere` says where workers of lost hosts go: on "spare" hosts, on
        "any host" that is left, or nowhere, which raises."""

    def snapshots(self, every: int, copies: int) -> None:
        """Have workers keep copies of values that are on one worker alone, each on so many others: taken now, and again
        when so many steps that replace state were called. `heal` goes back to the last where such values are lost, and
        runs the steps since then again. 0 ends that. Raises MonarchError where there are too few workers, or too little
        memory."""

    def check_replicas(self, every: int | None, names: Callable[[], Iterable[tuple[str, Handle]]]) -> None:
        """Compare the workers' blocks of each value that several have: now (None), or from now on, in the background,
        whenever so many steps that replace state were called; 0 ends that. `names` gives values with what the program
        calls them. Raises ReplicaError where they differ, in the background where a step is next run."""

    def writing(self) -> Writing:
        """The save that has the workers write values to files, once it is started."""

    def read(self, tensors: Sequence[tuple[TensorType, str, Sequence[Stored]]]) -> list[Handle]:
        """Make values of tensors in files: for each its type, its name in errors, and its blocks. Each worker reads the
        blocks that its layout gives it. Where that fails, waiting for the value raises DeviceMeshError."""

    def trace_start(self) -> None:
        """Measure every step from here on; waits until the workers are ready to."""

    def trace_stop(self) -> Trace:
        """Wait for all commands so far, and give the measurements. Also after the mesh was closed, or lost a worker:
        then the trace is of the finished ones."""

    def close(self) -> None:
        """Stop the workers and give back everything they held, once they have come to what messages to actors refer to.
        Idempotent."""


@dataclass(frozen=True)
class Loss:
    """The known facts of a mesh that has lost workers."""

    ended: Mapping[int, str]
    """How each has ended, by its number in the started mesh."""
    lost: tuple[str, ...]
    """The states that no worker holds whole and no snapshot has, as lines: name, type, and size on a worker."""
    hosts: Mapping[int, str]
    """The address of the host on which each was that has ended; empty for this machine."""


@runtime_checkable
class Resizable(Protocol):
    """An executor whose values can go on on other workers of the started mesh, or on more or fewer of them."""

    def loss(self, states: Sequence[tuple[str, Handle]]) -> Loss | None:
        """The lost ones of these states with their names; None where all workers are there. Raises MonarchError where
        workers do not answer."""

    def live(self) -> list[Handle]:
        """The handles that somebody holds and that have a value here."""

    def placed(self, handle: Handle) -> bool:
        """Whether the controller placed a value, and places it again where it is lost."""

    def take_hosts(self, shape: Shape) -> bool:
        """Have workers of that shape that hold no values, and share a host with others, go to hosts that have joined,
        where there are such. Then the mesh counts as lost until it is healed: whether it does. Waits for its steps."""

    def spread(self, handles: Sequence[Handle], shape: Shape) -> None:
        """Copy the values to workers that a mesh of another shape has and that lack them. They are the same along all
        mesh dims of which the two have other sizes. Waits for it; raises DeviceMeshError."""

    def carry(self, handle: Handle, shape: Shape, type: TensorType) -> None:
        """From now on a handle that only the caller knows is for the executor of another shape, whose workers have its
        value as a tensor of this type has it there."""

    def move(self, pairs: Sequence[tuple[Handle, Handle]], shape: Shape, bind: Callable[[], None]) -> None:
        """Have each handle stand for the value of another, which is on the workers of `shape` and is used up; or for
        its own, where it is the same handle, which is then for the executor of that shape. `bind` is called at the same
        time, perhaps twice: whatever interrupts this, all of it is done (at the latest by `settle`) or nothing. Raises
        DeviceMeshError, and has changed nothing, where the mesh is lost."""


class Outgoing(Protocol):
    """A message to actors that is being pickled."""

    def refer(self, executor: Executor, handle: Handle, parameter: bool, requires_grad: bool) -> tuple[Any, ...]:
        """The pickled form of a tensor on a mesh, as `__reduce__` gives it. Raises MonarchError for a mesh whose
        workers are not in the message's target."""


outgoing: ContextVar[Outgoing | None] = ContextVar("monarch message", default=None)
"""The message to actors that is being pickled now, if any."""


class Returned(Protocol):
    """Results that actors have returned for a program: tensors that stay where they were made."""

    def found(self, executor: Executor) -> list[Any]:
        """For each worker, once all have returned: the result in its process, with a type, of a replicated tensor, in
        the place of each tensor. Raises the actors' errors, and MonarchError where they are not in the workers'
        processes, or this was used before."""

    def adopt(self, executor: Executor, types: Sequence[TensorType]) -> list[Handle]:
        """Make values of them, whose shards they are, in the order of torch's pytrees. Once."""
