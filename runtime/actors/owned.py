"""The common part of meshes of processes and of actors: an owner spawned them, and they can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from monarch.compiler.mesh import MeshAlgebra, Shape
from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future

if TYPE_CHECKING:
    from typing import Self

    from monarch.runtime.actors.processes.process import Process

T = TypeVar("T")


class Owned(MeshAlgebra):
    """A mesh that somebody spawned, and that can be stopped.

    What it has besides is private, for the endpoints of actors have their names on the mesh.
    """

    _shape: Shape

    _id: str
    _name: str
    """The name that it was spawned with."""
    _addresses: tuple[str, ...]
    """The processes of the whole mesh, by base rank."""

    def stop(self, reason: str = "it was stopped") -> Future[None]:
        raise NotImplementedError

    def _have_stopped(self, process: Process, ranks: Sequence[int], reason: str) -> None:
        """End these places of it, on behalf of its owner, which gets their ends. Waits for nothing."""
        raise NotImplementedError

    def _whole(self) -> None:
        if len(self._shape) != len(self._addresses):
            raise RuntimeError(
                f"'{self._name}' {self.extent} is a slice of a mesh of {len(self._addresses)}: stop the whole mesh"
            )

    def _members(self) -> list[str]:
        return [self._addresses[base] for base in self._shape.ndslice]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop("its `async with` ended")


def own_end(name: str, what: str) -> RuntimeError:
    """The error for code that waits for its own end; `what` the mesh is of."""
    return RuntimeError(
        f"'{name}' was told to stop from one of its {what}, and ends once the code that runs there has: this cannot"
        " wait for that. Call stop() and do not wait, or have the owner stop the mesh"
    )


def done(several: Future[ValueMesh[None]], value: T, why: Callable[[], Exception | None] = lambda: None) -> Future[T]:
    """The same, with one value for all; `why` may know the cause of a process's end."""
    one: Future[T] = Future.pending()

    def finish() -> None:
        def decode() -> T:
            try:
                several.get()
            except SupervisionError:
                if (cause := why()) is not None:
                    raise cause from None
                raise
            return value

        one.resolve(decode)

    several.when_done(finish)
    return one
