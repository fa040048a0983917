"""What is recorded of one run of a program's function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import Source
from monarch.compiler.execution.executor import Executor
from monarch.compiler.graph import Graph
from monarch.compiler.passes.functionalize import functionalize
from monarch.compiler.symbols import Scope, is_named, poly_of
from monarch.compiler.tape import Expr, Tape, Value
from monarch.compiler.types import TensorType
from monarch.language.placing.asked import Question
from monarch.language.programs.attempt import nothing
from monarch.language.programs.changes import Change
from monarch.language.programs.effects import Effects, Make
from monarch.language.programs.growing import Growth
from monarch.language.programs.guards import Guards
from monarch.language.programs.nodes import Path, Spot
from monarch.language.programs.results import Result
from monarch.language.programs.stand_ins import StandIns
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.history import Ending
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import default_dtype


@dataclass
class Trace:
    """One run of a program's function, recorded."""

    name: str
    mesh: Mesh
    meshes: dict[str, Mesh]
    """Those of a program of several, by their names; empty for one of one mesh."""
    homes: dict[Value, Mesh]
    """Where results and the tensors that it leaves in Python are, in a program of several meshes."""
    dtype: torch.dtype
    """PyTorch's default dtype when it began, under which it is compiled and run."""
    tape: Tape
    result: Result
    end: Ending | None
    """Where the history of its results ends; None where none would have one in PyTorch."""
    through: list[int]
    """The arguments, by number, that require a gradient, to which such a history leads."""
    states: list[tuple[str, Cell]]
    """Label and cell of each state that is read or updated, in the order of first use."""
    escapes: list[tuple[str, weakref.ref[Cell], Value]]
    """Label, cell and value of each tensor that the trace made and that outlives it."""
    arguments: dict[str, int]
    """The numbers that are arguments: label -> number of the argument leaf."""
    hyperparameters: dict[str, float]
    """What the numbers of optimizers are in the call that is traced."""
    conditions: list[tuple[Expr, Any]]
    """What has to hold of the numbers of a call."""
    guards: Guards
    effects: Effects
    spots: list[tuple[Spot, tuple[Any, ...]]]
    """Where each state is found at a later call, and how the tensor there views it."""
    fixed: dict[Path, tuple[str, str]]
    """Hyperparameters that are built in, by place: optimizer's label and key."""
    returned: dict[int, Make]
    """The Python objects among the results, by the leaf's number: how another call finds or makes them."""
    sources: dict[str, tuple[Spot, int | None]]
    """Where each hyperparameter is found: its place, and its number among several."""
    stand_ins: StandIns
    """The numbers that each call reads in Python, and the lists to which it appends."""
    pinned: set[Path]
    """The places of such numbers of which the trace is valid for one value alone."""
    requiring: list[tuple[int, bool]]
    """The plain arguments, by number, that the program has require a gradient, or none."""
    apart: list[int]
    """The arguments, by number, by which it may differentiate: no other way leads to them."""
    passes: bool
    """Whether there are lists or dicts among its arguments."""
    asks_which: bool
    """Whether it may have asked which object an argument is."""
    with_history: list[int]
    """The arguments, by number, whose history ends at the program, if it differentiates."""
    scope: Scope | None
    """The named sizes that it is valid for all values of, under conditions; None where it has none."""
    free: frozenset[str | int]
    """The states, by label, and the arguments, by number, for which the user has given no layout."""
    large: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]]
    """The large plain tensors from outside that ops have read, each with its content."""
    cannot: tuple[str, Source | None] | None
    """Why a later call has to trace again, with the line, where no guards can say what it would do."""
    weights: list[int]
    """The states, by number, of which an autocast around a call would keep casts."""
    questions: list[Question]
    """What each call asks of actors before its step."""
    changes: list[Change | Growth]
    """What the traced call changes in Python."""
    undo: Callable[[], None]
    """Puts all Python objects back to what they were before the trace."""

    def end_of(self, cells: list[Cell], args: Any, kwargs: Any) -> Ending | None:
        """Where the history ends of what a call returns that reads these cells."""
        assert self.end is not None
        given = pytree.tree_leaves((args, kwargs)) if self.through else ()
        return self.end[0].of(cells, [given[number] for number in self.through])

    @cached_property
    def _functional(self) -> tuple[Graph, dict[str, str]]:
        updates = {label: entry.value for (label, _), entry in zip(self.states, self._state_inputs, strict=True)}
        updates.update({label: value for label, _, value in self.escapes})
        names = {mesh: name for name, mesh in self.meshes.items()}
        with default_dtype(self.dtype):
            graph, aliases = functionalize(
                self.tape,
                name=self.name,
                mesh=self.mesh._workers.spec if names else self.mesh.spec,
                returns=self.result.values,
                updates=updates,
                parts={name: mesh._shape for name, mesh in self.meshes.items()},
                homes={value: names[mesh] for value, mesh in self.homes.items()},
            )
        graph.free = self.free
        return graph, aliases

    @property
    def executor(self) -> Executor:
        """What runs its plan: for a program of several meshes that of the mesh of which all are parts."""
        executor = self.mesh.executor
        return executor.whole if self.meshes else executor

    def mesh_of(self, value: Value) -> Mesh:
        """The mesh on which a result is."""
        return self.homes.get(value, self.mesh)

    def by_mesh(self, cells: Iterable[Cell]) -> Iterator[tuple[Mesh, list[Cell]]]:
        """Cells by the mesh that they are on."""
        if not self.meshes:
            yield self.mesh, list(cells)
            return
        found: dict[Mesh, list[Cell]] = {}
        for cell in cells:
            found.setdefault(cell.mesh, []).append(cell)
        yield from found.items()

    @property
    def _state_inputs(self) -> list[Any]:
        return [entry for entry in self.tape.inputs if entry.kind == "state"]

    @property
    def graph(self) -> Graph:
        return self._functional[0]

    @property
    def aliases(self) -> dict[str, str]:
        """States that share another's output: label -> the label that the graph updates."""
        return self._functional[1]

    @cached_property
    def key(self) -> Any:
        """Equal for equal programs."""
        key = self.tape.key if self.scope is None else _unscoped(self.tape.key)
        shapes = tuple((name, mesh._shape) for name, mesh in (self.meshes or {"": self.mesh}).items())
        homes = tuple(mesh._shape for mesh in self.homes.values())
        escapes = tuple(value for _, _, value in self.escapes)
        return key, tuple(self.result.values), tuple(self.result.strides), escapes, shapes, homes

    def release(self) -> None:
        """Let go of what only the traced call needed, and keep nothing of the user's alive."""
        for number in self.returned:
            self.result.leaves[number] = None
        self.states = []
        self.end = None if self.end is None else self.end[0].of((), ())
        self.hyperparameters = {}
        self.stand_ins.release()
        self.changes = []
        self.undo = nothing
        self.guards.close()
        self.effects.close()

    def line(self, name: str) -> Source | None:
        """Where the user's code names something first."""
        return self.guards.entered.line(name)

    @cached_property
    def constants(self) -> list[torch.Tensor]:
        """The plain tensors that are built in."""
        return [entry.tensor for entry in self.tape.inputs if entry.tensor is not None]


def _unscoped(key: Any) -> Any:
    """A tape's key with sizes that can be compared with another trace's."""
    if isinstance(key, tuple):
        return tuple([_unscoped(entry) for entry in key])
    if isinstance(key, TensorType):
        return str(key)
    return poly_of(key) if is_named(key) else key
