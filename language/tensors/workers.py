"""The workers behind a mesh, and their state as meshes know it."""

from __future__ import annotations

import threading
import weakref
from itertools import count
from typing import Protocol

from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.executor import Executor, Handle, Hosts, Procs
from monarch.compiler.execution.factories import abstract_can_run, executor_for
from monarch.compiler.mesh import Shape
from monarch.compiler.types import MeshSpec
from monarch.language.source import user_source

_numbers = count()


class State(Protocol):
    """A value on the workers that steps replace, as far as meshes know it."""

    handle: Handle | None
    kept: bool
    """Whether its mesh knows it."""

    def restored(self) -> None:
        """The mesh was healed."""


class Workers:
    """The workers behind a mesh and every part of it: started when they are first needed."""

    def __init__(self, spec: MeshSpec, where: Hosts | Procs | None) -> None:
        self.spec = spec
        self.shape = Shape.of(spec.sizes)
        self.where = where
        self.abstract = False
        self.executor: Executor | None = None
        self.names: weakref.WeakKeyDictionary[State, str] = weakref.WeakKeyDictionary()
        self.number = next(_numbers)
        self.copies: int | None = None
        """How many copies `snapshots` keeps; None where nobody has said."""
        self.anomaly = ""
        """The anomaly that its programs look for in every value (`CompileOptions.anomaly`)."""
        self.closed = False
        self.given_up = False
        """Whether steps were given up, and Python and all state still have to go back."""
        self._starting = threading.RLock()

    def start(self) -> Executor:
        if self.abstract and not abstract_can_run():
            raise MonarchError(
                f"an abstract mesh has no workers: {self.spec}",
                hint="programs on it can be traced and compiled, not run: Mesh(...) without .abstract has workers.",
            )
        if self.closed:
            hint = "its tensors have ended with its workers: make a new Mesh, and monarch.distribute to it."
            raise MonarchError(f"the mesh is closed: {self.spec}", hint=hint, source=user_source())
        with self._starting:  # of several threads one starts them
            if self.executor is None:
                self.executor = executor_for(self.spec, self.where)
            return self.executor

    def close(self) -> None:
        self.closed = True
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.close()
