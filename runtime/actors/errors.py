"""Errors of actors. All of these survive pickling, for they cross processes."""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import dataclass

import cloudpickle

from monarch.compiler.mesh import Point
from monarch.compiler.plan import MonarchError


class ActorError(MonarchError):
    """An endpoint raised `exception`; the text has its traceback in the actor."""

    def __init__(self, exception: BaseException, text: str) -> None:
        super().__init__(text)
        self.exception = exception

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.exception, self.message)

    @staticmethod
    def of(error: BaseException, where: str, place: Point | None = None) -> ActorError:
        """A caller's error for an exception that was just caught; `where` is such as "trainer[3].step", and `place` is
        that of the actor in its mesh.

        An exception that cannot be pickled, or read back, is replaced by an `OpaqueError`.
        """
        said = traceback.format_exception_only(error)[-1].strip()
        trace = trace_of(error)
        try:
            pickle.loads(cloudpickle.dumps(error))  # as messages are: what a script defines can be sent
        except Exception as refused:  # user's code, which may raise anything
            error = OpaqueError(said, hint=f"{type(error).__name__} itself cannot be sent: {refused}")
        at = f"\n  at {place}" if place else ""
        return ActorError(error, f"{where} raised {said}{at}\n\nRemote traceback:\n{trace}")


def trace_of(error: BaseException) -> str:
    """An exception's traceback as text, from where the user's code begins."""
    told = traceback.TracebackException.from_exception(error)
    while len(told.stack) > 1 and os.path.dirname(told.stack[0].filename) == os.path.dirname(__file__):
        del told.stack[0]
    return "".join(told.format()).rstrip()


class OpaqueError(MonarchError):
    """Stands for an exception that cannot be pickled. The message is the exception's text."""


class SupervisionError(MonarchError, RuntimeError):
    """A message was for an actor that is stopped or dead, or that ended before it answered.

    `endpoint` is the called one, such as "trainer.step", where that is known.
    """

    def __init__(self, message: str, endpoint: str | None = None) -> None:
        super().__init__(message)
        self.endpoint = endpoint

    @staticmethod
    def refusing(name: str, rank: int | None, place: Point | None, method: str, reason: str) -> SupervisionError:
        """For a call of an actor that has ended; `place` is its place in its mesh, where that is known."""
        who = f"'{name}'" if rank is None else f"'{name}[{rank}]'"
        at = f" at {place}" if place else ""
        return SupervisionError(f"{who}{at} takes no more messages: {reason}", f"{name}.{method}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.endpoint)


@dataclass(frozen=True)
class MeshFailure:
    """The failure of a mesh that an owner has, as it gets it: `__supervise__(failure)`.

    `mesh_id`    the mesh that failed: see `is_of`
    `mesh_name`  the name that it was spawned with
    `rank`       the place that failed, if it was one: row-major in the mesh as spawned
    `reason`     what happened, in words; for an exception its traceback
    `status`     the exit status of a process: -9 after `kill -9`
    `log`        the last lines that the process wrote
    `cause`      the failure that was being handled when this one came about
    """

    mesh_id: str
    mesh_name: str
    rank: int | None
    reason: str
    status: int | None = None
    log: tuple[str, ...] = ()
    cause: MeshFailure | None = None

    def is_of(self, mesh: object) -> bool:
        """Whether it is this mesh, or the mesh that this is a slice of, that failed."""
        return getattr(mesh, "_id", None) == self.mesh_id

    def report(self) -> str:
        """All that is known, over several lines."""
        place = "" if self.rank is None else f"[{self.rank}]"
        lines = [f"{self.mesh_name}{place}: {self.reason}"]
        if self.log:
            lines += ["its last lines were:", *(f"    {line}" for line in self.log)]
        if self.cause is not None:
            lines += ["which happened because of", *(f"  {line}" for line in self.cause.report().splitlines())]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"MeshFailure: {self.report()}"
