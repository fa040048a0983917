"""The cell behind distributed tensors, which has the value of a tensor and of all its views."""

from __future__ import annotations

from copy import copy
from typing import Protocol

from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.executor import Handle
from monarch.compiler.types import TensorType
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh


class Recorded(Protocol):
    """A recording, as far as tensors know it."""

    program: bool
    """Whether it is a program's, and not one of ops pending on a mesh."""


class Failure:
    """The error of an op whose result was needed, and whether some call has raised it."""

    __slots__ = ("error", "raised")

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.raised = False


class Cell:
    """The storage behind a tensor and all its views: data on the workers (`handle`), or a value still being
    recorded."""

    __slots__ = ("__weakref__", "_type", "cut", "failure", "free", "handle", "kept", "mesh", "placed", "recording")

    def __init__(self, mesh: Mesh, type: TensorType, handle: Handle | None = None, placed: bool = False) -> None:
        self.mesh = mesh
        self.handle = handle
        self.kept = False
        self.placed = placed or handle is not None  # its layout is known, not still the partitioner's to choose
        self.recording: Recorded | None = None
        self.failure: Failure | None = None
        self.free = False  # nobody has said its layout, and a program with layouts="auto" may choose one
        self.cut = False  # a program left it in Python, and with it the history that autograd had of it
        self._type = type

    @property
    def type(self) -> TensorType:
        return self._type if self.handle is None else self.handle.type

    def check(self) -> None:
        """Raise unless a recording that did not make this cell can read its value."""
        self.raise_failure()
        if self.handle is None and self.recording is not None:
            if self.recording is self.mesh.pending:
                self.mesh.flush()
                return self.check()
            if self.mesh.is_closed:
                raise MonarchError(f"the mesh of this tensor is closed: {self.mesh!r}")
            raise MonarchError(
                f"this tensor ({self._type}) was made while a program was traced, and has no value",
                hint="return it from the program, and compute there what a function or iterator that it returns would "
                "compute later; tensors that a program leaves behind are filled by its calls.",
                source=user_source(),
            )
        return None

    def raise_failure(self) -> None:
        """Raise the failure that this value depends on: each time where there is no value, and otherwise unless it was
        raised before, for then all know that the cell has its value from before the failure."""
        failure = self.failure
        if failure is None:
            return
        if self.handle is not None and failure.raised:
            self.failure = None
            return
        failure.raised = True
        raise copy(failure.error)  # an error that was raised keeps its frames, and the tensors in them, alive

    def vary(self, dims: tuple[str, ...]) -> bool:
        """Let a value that is being recorded vary along these mesh dims from now on. Gives False where its layout is
        known already."""
        if not self.placed:
            self._type = self._type.varying_along(dims)
        return not self.placed

    def restored(self) -> None:
        """The mesh was healed: a value that there is is that of the last step that is applied."""
        if self.handle is not None:
            self.failure = None

    def set(self, handle: Handle) -> None:
        self.handle = handle
        self.placed = True
        self.recording = None
        self.failure = None
