"""Running users' files without workers: values have types and no data, and nothing is forked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from monarch.compiler.errors import ProgramError
from monarch.compiler.execution.executor import Bind, Executor, Handle, Writing
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.execution.storage import Stored
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import MeshSpec, Plan, TensorType, Trace
from monarch.language.source import user_source
from monarch.language.tensors.mesh import mesh_sizes


@dataclass(frozen=True, eq=False)
class TypedHandle:
    """A value that is only a type."""

    type: TensorType


class TypesOnly:
    """An `Executor` that computes types: a placed tensor has the type that it was placed with, and a step's results
    have those that its plan names."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh

    @property
    def whole(self) -> Executor:
        return self

    def over(self, shape: Shape) -> Executor:
        return TypesOnly(MeshSpec(tuple(shape.extent.items())))

    def put(self, tensor: torch.Tensor, type: TensorType, lent: bool = False) -> Handle:
        type.check(self.mesh)
        return TypedHandle(type)

    def run(
        self,
        plan: Plan,
        arguments: Sequence[Handle | torch.Tensor | float | int],
        bind: Bind | None = None,
        *,
        release: Sequence[Handle] = (),
    ) -> list[Handle]:
        made: list[Handle] = [TypedHandle(spec.type) for spec in plan.outputs]
        if bind is not None:
            bind(made)
        return made

    def settle(self) -> bool:
        """Nothing interrupts a call in the middle."""
        return False

    def give_up(self, handle: Handle | None) -> bool:
        """There are no steps."""
        return True

    def shards(
        self, handle: Handle, workers: Sequence[int] | None = None, *, quiet: bool = False
    ) -> list[torch.Tensor]:
        raise _needs_workers("a tensor's value is needed")

    @property
    def actor_processes(self) -> None:
        raise _needs_workers("tensors are exchanged with actors")

    def worker_pids(self) -> list[int]:
        raise _needs_workers("a worker's process is asked for")

    def wait(self, handle: Handle) -> None:
        """There is nothing to wait for."""

    def recover(self, handle: Handle, wait: bool = True) -> Handle:
        return handle

    def undo(self) -> None:
        """No step fails."""

    def heal(self, states: Sequence[tuple[str, Handle]], give_up: bool = False, elsewhere: str = "") -> bool:
        return False  # no worker can die

    def snapshots(self, every: int, copies: int) -> None:
        """No worker can die."""

    def check_replicas(self, every: int | None, names: Callable[[], Iterable[tuple[str, Handle]]]) -> None:
        """No worker holds anything."""

    def writing(self) -> Writing:
        raise _needs_workers("tensors are to be saved")

    def read(self, tensors: Sequence[tuple[TensorType, str, Sequence[Stored]]]) -> list[Handle]:
        return [TypedHandle(type_) for type_, *_ in tensors]

    def trace_start(self) -> None:
        raise _needs_workers("steps are to be measured")

    def trace_stop(self) -> Trace:
        raise _needs_workers("steps are to be measured")

    def close(self) -> None:
        """There is nothing to stop."""


def _needs_workers(what: str) -> ProgramError:
    return ProgramError(
        f"{what} while the file is loaded, and no workers run that could compute it",
        hint="monarchc imports the file only to find the program. Put the code that runs the program below\n"
        '    if __name__ == "__main__":\n'
        "so that importing the file computes nothing.",
        source=user_source(),
    )


@contextlib.contextmanager
def without_workers(sizes: Mapping[str, int], arguments: Sequence[str]) -> Iterator[None]:
    """Meshes made within the block have no workers, and `sizes` instead of their own. The output of the user's code
    goes to standard error, for standard output is the command's own; it sees `arguments` as its command line."""
    before, sys.argv = sys.argv, list(arguments)
    try:
        with executors_by(TypesOnly, abstract=True), mesh_sizes(sizes), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = before
