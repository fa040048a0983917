"""Faults of workers. Each is a command to one worker, with its place in the order of the mesh's commands, so that it
comes at the same place in every run of a test."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from monarch.compiler.plan import MonarchError
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.parts import PartExecutor
from monarch.runtime.controller.steps import RemoteTensor
from monarch.runtime.worker.faults import Kind

Resource = Literal["memory", "files", "file size"]
_LIMITS: dict[Resource, Kind] = {"memory": Kind.MEMORY, "files": Kind.FILES, "file size": Kind.FILE_SIZE}


class Valued(Protocol):
    """A `monarch.DistributedTensor`."""

    def _value(self) -> tuple[object, Any]: ...


class OnWorkers(Protocol):
    """A `monarch.distributed.Mesh`."""

    @property
    def executor(self) -> object: ...


def kill(mesh: OnWorkers, worker: int, instruction: int | None = None) -> None:
    """End a worker, by its rank, as `kill -9` does: when it comes to this place in the order of commands, or in its
    next step, when it comes to this instruction of the plan, or to the last that there is."""
    _inject(mesh, worker, Kind.KILL, instruction)


def stop(mesh: OnWorkers, worker: int, seconds: float, instruction: int | None = None) -> None:
    """Stop a worker as Ctrl-Z does (SIGSTOP), and let it go on after so many seconds. Where: as for `kill`."""
    _inject(mesh, worker, Kind.STOP, instruction, _nanoseconds(seconds))


def slow(mesh: OnWorkers, worker: int, seconds: float) -> None:
    """Each instruction of the worker's next step takes so many seconds longer."""
    _inject(mesh, worker, Kind.SLOW, 0, _nanoseconds(seconds))


def fail(mesh: OnWorkers, worker: int, instruction: int = 0) -> None:
    """In its next step a worker fails with an error instead of running this instruction: at the latest the commit, for
    behind it stand none that can fail."""
    _inject(mesh, worker, Kind.FAIL, instruction)


def nan(mesh: OnWorkers, worker: int, instruction: int = 0) -> None:
    """In its next step a worker's first floating-point result, from this instruction on, gets a NaN as its first
    element, as of a broken processor, without an error."""
    _inject(mesh, worker, Kind.NAN, instruction)


def limit(mesh: OnWorkers, worker: int, resource: Resource, left: int | None) -> None:
    """From here on a worker has only so much left: of memory (bytes of address space) or open files; or, with
    "file size", no file that it writes can be larger than so many bytes, which is how a full disk looks. None lifts
    the limit. These are the system's own limits (`setrlimit`)."""
    _inject(mesh, worker, _LIMITS[resource], None, -1 if left is None else left)


def cut(mesh: OnWorkers, worker: int, instruction: int | None = None) -> None:
    """Cut a worker's links to its counterparts on other hosts. Where: as for `kill`. Without other hosts: nothing."""
    _inject(mesh, worker, Kind.CUT, instruction)


def garble(mesh: OnWorkers, worker: int, instruction: int | None = None) -> None:
    """Have each counterpart on other hosts be sent a message that was spoilt on its way. Where: as for `kill`."""
    _inject(mesh, worker, Kind.GARBLE, instruction)


def delay(mesh: OnWorkers, worker: int, seconds: float) -> None:
    """Until the mesh is healed, each message that a worker sends to its counterparts on other hosts waits so long."""
    _inject(mesh, worker, Kind.DELAY, None, _nanoseconds(seconds))


def flip(mesh: OnWorkers, worker: int, tensor: Valued, bit: int = 0) -> None:
    """Flip a bit of a worker's block of a distributed tensor, as broken memory does, without an error. Bits are
    numbered from the first element's lowest. MonarchError for a tensor that is not on the mesh."""
    on, (handle, _) = _executor(mesh, worker), tensor._value()
    if not isinstance(handle, RemoteTensor) or handle.owner is not on:
        raise MonarchError(
            "bits are flipped in tensors that are on the mesh", hint="chaos.flip(mesh, 1, model.weight)."
        )
    if bit < 0:
        raise MonarchError(f"no bit {bit}: they are numbered from 0")
    on.inject(worker, Kind.FLIP, -1, bit, handle.id)


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def _executor(mesh: OnWorkers, worker: int) -> MeshExecutor | PartExecutor:
    executor = mesh.executor
    if not isinstance(executor, (MeshExecutor, PartExecutor)):
        raise MonarchError("faults are injected into meshes with workers", hint="this one has none.")
    if not 0 <= worker < executor.mesh.workers:
        raise MonarchError(f"no worker {worker}: {executor.mesh} has workers 0 to {executor.mesh.workers - 1}")
    return executor


def _inject(mesh: OnWorkers, worker: int, kind: Kind, instruction: int | None, value: int = 0) -> None:
    executor = _executor(mesh, worker)
    if instruction is not None and instruction < 0:
        raise MonarchError(f"no instruction {instruction}: they are numbered from 0")
    executor.inject(worker, kind, -1 if instruction is None else instruction, value)
