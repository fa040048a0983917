"""Running a function once to record it: what the tape holds, what it reads and leaves behind, what it depends on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError
from monarch.compiler.graph import Graph
from monarch.compiler.passes.capture import Expr, Tape, Value
from monarch.compiler.passes.functionalize import functionalize
from monarch.compiler.types import TensorType
from monarch.language.environment import (
    Environment,
    Guard,
    module_guards,
    optimizer_guards,
    state_names,
)
from monarch.language.mesh import Mesh
from monarch.language.modules import module_paths
from monarch.language.optimizers import Hyperparameter, OptimizerSnapshot, OptimizerWatch
from monarch.language.random import counting_streams
from monarch.language.recorder import tracing
from monarch.language.recording import Recording
from monarch.language.shapes import to_fake
from monarch.language.tensor import Cell, DistributedTensor


@dataclass(frozen=True)
class Gradient:
    """A leaf that autograd may give a gradient: what its `.grad` was before and after the trace."""

    leaf: DistributedTensor
    before: torch.Tensor | None
    after: torch.Tensor | None


@dataclass(frozen=True)
class Result:
    """What a program gives back: a pytree whose leaves are the program's results (`Value`s), numbers of the call
    (`Expr`s) and Python objects."""

    leaves: list[Any]
    spec: Any

    @property
    def values(self) -> list[Value]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Value)]


@dataclass
class Trace:
    """One run of a program's function, recorded."""

    name: str
    mesh: Mesh
    tape: Tape
    result: Result
    states: list[tuple[str, Cell]]
    """Label and cell of each state that is read or updated, in the order of first use."""
    escapes: list[tuple[str, weakref.ref[Cell], Value]]
    """Label, cell and value of each tensor that the trace made and that outlives it."""
    gradients: list[Gradient]
    arguments: dict[str, int]
    """The scalars that are float arguments: label -> number of the argument leaf."""
    hyperparameters: dict[str, Hyperparameter]
    fixed: list[tuple[str, dict[str, Any], str, Any]]
    """Hyperparameters that are built in: (optimizer's label, group, key, value)."""
    guards: list[tuple[Expr, Any]]
    identities: list[Guard]
    flags: list[tuple[DistributedTensor, bool]]
    """Which tensors required a gradient."""
    lengths: list[tuple[list[Any], int]]
    """How many parameter groups the optimizers had."""
    constants: list[tuple[torch.Tensor, int]]
    """Plain tensors that are built in, with the versions that they had."""
    undo: Callable[[], None]
    """Puts gradients and optimizers back to what they were before the trace."""

    @cached_property
    def _functional(self) -> tuple[Graph, dict[str, str]]:
        updates = {label: entry.value for (label, _), entry in zip(self.states, self._state_inputs, strict=True)}
        updates.update({label: value for label, _, value in self.escapes})
        return functionalize(
            self.tape, name=self.name, mesh=self.mesh.spec, returns=self.result.values, updates=updates
        )

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
        return (
            self.tape.key,
            tuple(self.result.values),
            tuple(value for _, _, value in self.escapes),
        )

    def release(self) -> None:
        """Let go of what only undoing needed: earlier gradients and optimizer state."""
        self.gradients = []
        self.undo = _nothing

    def reads(self, cells: set[int]) -> bool:
        """Whether it reads one of these cells (by id)."""
        return any(id(cell) in cells for _, cell in self.states)

    @property
    def escape_cells(self) -> list[Cell]:
        return [cell for _, ref, _ in self.escapes if (cell := ref()) is not None]


def trace(
    function: Callable[..., Any],
    name: str,
    mesh: Mesh,
    environment: Environment,
    leaves: list[Any],
    spec: Any,
    types: dict[int, TensorType],
    names: dict[int, str],
    varying: set[tuple[str, str]],
) -> Trace:
    """Run `function` with symbolic arguments and record it.

    `leaves` and `spec` are the flattened (args, kwargs); `types` gives the type of each tensor leaf, `names` the
    parameters' names where they have one. Whatever fails, the gradients and optimizers that the function has touched
    are as they were.
    """
    mesh.flush()
    recording = Recording(mesh, program=True)
    labels = {id(optimizer): label for label, optimizer in environment.optimizers.items()}
    watch = OptimizerWatch(recording, labels, varying)
    snapshots = [OptimizerSnapshot(optimizer) for optimizer in environment.optimizers.values()]
    before = [(leaf, leaf.grad) for leaf in environment.leaves()]

    def undo() -> None:
        for leaf, grad in before:
            if leaf.grad is not grad:
                leaf.grad = grad
        for snapshot in snapshots:
            snapshot.restore()
        watch.restore()

    try:
        symbols, arguments = _symbols(recording, leaves, types, names)
        args, kwargs = pytree.tree_unflatten(symbols, spec)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad())
            stack.enter_context(counting_streams())
            stack.enter_context(watch.watching())
            stack.enter_context(module_paths(environment))
            stack.enter_context(tracing(recording))
            returned = function(*args, **kwargs)
        result = _result(recording, returned)
        for number, symbol in enumerate(symbols):
            if isinstance(symbol, DistributedTensor) and symbol.is_leaf and symbol.grad is not None:
                raise ProgramError(
                    f"argument {number} of the program is given a gradient",
                    hint="close over the tensor instead of passing it, or return torch.autograd.grad(loss, x).",
                )
        del returned, args, kwargs, symbols
        gradients = [Gradient(leaf, grad, leaf.grad) for leaf, grad in before]
        labels_of = state_names(environment, watch.optimizers)
        escapes = _escapes(recording, labels_of)
    except BaseException:
        undo()
        raise
    taken: set[str] = set(recording.scalars) | {"seed"}
    states = _labelled(
        [(labels_of.get(id(entry.cell)), entry.cell) for entry in recording.states.values()], taken, "state"
    )
    inputs = [entry for entry in recording.tape.inputs if entry.kind == "state"]
    for (label, _), entry in zip(states, inputs, strict=True):
        entry.label = label
    made = _labelled([(labels_of.get(id(cell)), cell) for cell, _ in escapes], taken, "made")
    constants = [(tensor, version) for tensor, version, _ in recording.constants.values()]
    recording.release()
    return Trace(
        name=name,
        mesh=mesh,
        tape=recording.tape,
        result=result,
        states=states,
        escapes=[(label, weakref.ref(cell), value) for (label, cell), (_, value) in zip(made, escapes, strict=True)],
        gradients=gradients,
        arguments=arguments,
        hyperparameters=watch.scalars,
        fixed=watch.fixed,
        guards=list(dict.fromkeys(recording.guards)),
        identities=module_guards(environment) + optimizer_guards(watch.optimizers),
        flags=[(tensor, tensor.requires_grad) for _, tensor in environment.named_tensors()],
        lengths=[(optimizer.param_groups, len(optimizer.param_groups)) for optimizer in watch.optimizers],
        constants=constants,
        undo=undo,
    )


def _symbols(
    recording: Recording, leaves: list[Any], types: dict[int, TensorType], names: dict[int, str]
) -> tuple[list[Any], dict[str, int]]:
    """Symbolic arguments: tensors become inputs, floats Scalars."""
    symbols: list[Any] = []
    arguments: dict[str, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            symbol: Any = recording.input(to_fake(leaf), number, types[number], names.get(number))
            symbol.requires_grad_(leaf.requires_grad)
        elif type(leaf) is float:
            label = f"argument{number}"
            arguments[label] = number
            symbol = recording.scalar(label, leaf)
        else:
            symbol = leaf
        symbols.append(symbol)
    return symbols, arguments


def _result(recording: Recording, returned: Any) -> Result:
    leaves, spec = pytree.tree_flatten(returned)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, DistributedTensor):
            if leaf.mesh is not recording.mesh:
                raise ProgramError(f"the program returns a tensor on another mesh: {leaf.mesh!r}")
            found.append(recording.value_of(leaf._ref))
        elif isinstance(leaf, torch.SymFloat):
            found.append(leaf.node.expr)
        else:
            found.append(leaf)
    return Result(found, spec)


def _escapes(recording: Recording, names: dict[int, str]) -> list[tuple[Cell, Value]]:
    """The tensors that the trace made and that are still alive. One that nothing names may only be waiting for the
    garbage collector."""

    def living() -> list[tuple[Cell, Value]]:
        return [(cell, value) for ref, value in recording.made if (cell := ref()) is not None]

    found = living()
    if any(id(cell) not in names for cell, _ in found):
        del found
        gc.collect()
        found = living()
    return found


def _labelled(cells: list[tuple[str | None, Cell]], taken: set[str], fallback: str) -> list[tuple[str, Cell]]:
    """A label of its own for every cell."""
    found: list[tuple[str, Cell]] = []
    for number, (name, cell) in enumerate(cells):
        label = base = name or f"{fallback}{number}"
        count = 2
        while label in taken:
            label, count = f"{base}#{count}", count + 1
        taken.add(label)
        found.append((label, cell))
    return found


def scalar_values(trace: Trace, leaves: list[Any]) -> dict[str, float]:
    """The numbers that a call takes anew, by label."""
    values: dict[str, float] = {label: leaves[number] for label, number in trace.arguments.items()}
    for label, source in trace.hyperparameters.items():
        values[label] = source()
    return values


def _nothing() -> None:
    """There is nothing to undo."""


@contextmanager
def undone(found: Trace) -> Iterator[Trace]:
    """A trace that is only looked at: nothing of it stays."""
    try:
        yield found
    finally:
        found.undo()
