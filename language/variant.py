"""A compiled program: the plan, the cells that its states are, and the facts that must hold for it to be run."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import DeviceMeshError, MonarchError
from monarch.compiler.execution.executor import Handle
from monarch.compiler.passes.capture import Expr, Value, evaluate
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.types import TensorType
from monarch.language.compile import compile_graph
from monarch.language.random import next_seed
from monarch.language.shapes import make_fake
from monarch.language.tensor import Cell, DistributedTensor, Ref
from monarch.language.trace import Trace, scalar_values

_INPUT, _STATE, _SCALAR, _SEED = range(4)


class Variant:
    """One way in which a program was traced, compiled. `holds` asks whether it fits a call; `run` runs it."""

    def __init__(self, trace: Trace, options: CompileOptions) -> None:
        self.plan: Plan = compile_graph(trace.graph, options)
        self.key = trace.key
        self.mesh = trace.mesh
        self._aliases: dict[str, list[str]] = {}
        for alias, label in trace.aliases.items():
            self._aliases.setdefault(label, []).append(alias)
        self._state_labels = [label for label, _ in trace.states]
        self._escape_labels = [label for label, _, _ in trace.escapes]
        self._fakes = [make_fake(value.shape, value.dtype) for value in trace.result.values]
        self._accepted: set[tuple[bool, ...]] = set()
        self._ran = False
        self.bind(trace)

    def bind(self, trace: Trace) -> None:
        """Take the cells, gradients and facts of a trace that equals the one that was compiled."""
        self.trace = trace
        cells = dict(zip(self._state_labels, (cell for _, cell in trace.states), strict=True))
        escapes = dict(zip(self._escape_labels, (ref for _, ref, _ in trace.escapes), strict=True))
        self.escaped = {id(cell) for cell in trace.escape_cells}
        self._fetch: list[tuple[int, Any]] = []
        for spec in self.plan.inputs:
            if spec.kind == "input":
                self._fetch.append((_INPUT, spec.label))
            elif spec.kind == "state":
                self._fetch.append((_STATE, cells[str(spec.label)]))
            elif spec.kind == "scalar":
                self._fetch.append((_SCALAR, str(spec.label)))
            else:
                self._fetch.append((_SEED, None))
        self._returns = sum(spec.kind == "return" for spec in self.plan.outputs)
        # For each state output the cells that take its handle: strongly held states, and weakly what the trace made.
        self._targets: list[tuple[list[Cell], list[weakref.ref[Cell]]]] = []
        for spec in self.plan.outputs[self._returns :]:
            labels = [str(spec.label), *self._aliases.get(str(spec.label), ())]
            self._targets.append(
                (
                    [cells[name] for name in labels if name in cells],
                    [escapes[name] for name in labels if name in escapes],
                )
            )
        read = {id(cell) for _, cell in trace.states}
        self._made = [ref for _, made in self._targets for ref in made if id(ref()) not in read]
        self._layouts = [(cells[str(spec.label)], spec.type) for spec in self.plan.inputs if spec.kind == "state"]
        self._same = [
            (cell, self._cell_of(trace, entry.same_as))
            for (_, cell), entry in zip(trace.states, trace._state_inputs, strict=True)
            if entry.same_as is not None
        ]
        self._small = [cell for cell, type_ in self._layouts if type_.ndim == 0]
        self._accepted.add(tuple(gradient.before is None for gradient in trace.gradients))
        self._leaves = [gradient.leaf for gradient in trace.gradients]
        # Gradients that the program adds to have to be the cells that it was bound to.
        self._accumulated = [
            (gradient.leaf, gradient.before._ref.cell)
            for gradient in trace.gradients
            if isinstance(gradient.before, DistributedTensor) and id(gradient.before._ref.cell) in read
        ]
        self._assigned = [(g.leaf, g.after) for g in trace.gradients if g.after is not g.before]
        self._identities = trace.identities
        self._fresh = True
        self._undo = trace.undo
        self.mesh.keep(cell for _, cell in trace.states)
        trace.release()

    @staticmethod
    def _cell_of(trace: Trace, value: Value) -> Cell:
        inputs = trace._state_inputs
        return next(cell for (_, cell), entry in zip(trace.states, inputs, strict=True) if entry.value is value)

    # -- whether it fits a call ----------------------------------------------------------------------------------

    def holds(self, leaves: list[Any]) -> bool:
        """Whether what the trace depended on is still so."""
        for holder, key, expected in self._identities:
            if holder.get(key) is not expected:
                return False
        trace = self.trace
        for tensor_, flag in trace.flags:
            if tensor_.requires_grad is not flag:
                return False
        for groups, length in trace.lengths:
            if len(groups) != length:
                return False
        for _, group, key, value in trace.fixed:
            if group.get(key) != value:
                return False
        for tensor, version in trace.constants:
            if tensor._version != version:
                return False
        if trace.guards:
            values = scalar_values(trace, leaves)
            for expr, expected in trace.guards:
                if evaluate(expr, values) != expected:
                    return False
        return self._gradients_hold() and self._states_hold()

    def _gradients_hold(self) -> bool:
        for leaf, cell in self._accumulated:
            now = leaf.grad
            if not isinstance(now, DistributedTensor) or now._ref.cell is not cell:
                return False
        return tuple([leaf.grad is None for leaf in self._leaves]) in self._accepted

    def _states_hold(self) -> bool:
        for cell, expected in self._layouts:
            handle = cell.handle
            if handle is None or (handle.type is not expected and handle.type != expected):
                return False
        for cell, first in self._same:
            if cell.handle is not first.handle:
                return False
        return len({id(cell.handle) for cell in self._small}) == len(self._small)

    def moved_hyperparameters(self) -> list[tuple[str, str]]:
        """The hyperparameters, as (optimizer's label, key), that were built in and have changed."""
        return [(label, key) for label, group, key, value in self.trace.fixed if group.get(key) != value]

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, leaves: list[Any]) -> Any:
        """Run one step: returns at once, with tensors that are still being computed."""
        trace = self.trace
        scalars = scalar_values(trace, leaves) if trace.arguments or trace.hyperparameters else {}
        arguments: list[Any] = []
        for kind, where in self._fetch:
            if kind == _STATE:
                arguments.append(where.handle)
            elif kind == _INPUT:
                leaf = leaves[where]
                arguments.append(leaf._ref.cell.handle if isinstance(leaf, DistributedTensor) else leaf)
            elif kind == _SCALAR:
                arguments.append(scalars[where])
            else:
                arguments.append(next_seed())
        self._give_up_made()
        first = not self._ran and bool(self._made)
        try:
            handles = self.mesh.executor.run(self.plan, arguments)
            if first:
                self._wait(handles)
        except BaseException:
            self._lose_made()
            self._undo()
            raise
        self._settle(handles)
        results: list[Any] = []
        taken = 0
        for leaf in trace.result.leaves:
            if isinstance(leaf, Value):
                fake, handle = self._fakes[taken], handles[taken]
                taken += 1
                results.append(DistributedTensor(fake, Ref(Cell(self.mesh, handle.type, handle), fake)))
            elif isinstance(leaf, Expr):
                results.append(evaluate(leaf, scalars))
            else:
                results.append(leaf)
        spec = trace.result.spec
        return results[0] if spec.is_leaf() else pytree.tree_unflatten(results, spec)

    def _wait(self, handles: list[Handle]) -> None:
        """Wait for the step that makes state for the first time, such as an optimizer's: if it fails, Python holds on
        to tensors that will never have a value, unless what the trace has left there is undone."""
        try:
            self.mesh.fetch(lambda executor: executor.wait(handles[0]))
        except DeviceMeshError:
            raise
        except BaseException:  # an interrupt: the step goes on
            self._settle(handles)
            self._undo = _nothing
            raise

    def _give_up_made(self) -> None:
        """Let go of what the last step left and this one makes anew without reading it, such as gradients: the workers
        free it before they take the step, rather than hold both."""
        for ref in self._made:
            cell = ref()
            if cell is not None:
                cell.handle = None
        if self._fresh:  # other tensors are the leaves' gradients still
            for leaf, grad in self._assigned:
                if leaf.grad is not grad:
                    leaf.grad = None

    def _lose_made(self) -> None:
        """The step could not start: who reads what was given up for it is told so."""
        self._fresh = True
        for ref in self._made:
            cell = ref()
            if cell is not None and cell.recording is None:
                cell.error = MonarchError(
                    f"this tensor ({cell.type}) was given up for a step of '{self.plan.name}' that could not start",
                    hint="a step that works makes it anew; the state of the last one is kept.",
                )

    def _settle(self, handles: list[Handle]) -> None:
        """Give states and what outlives the trace their new values."""
        fresh, self._fresh, self._ran, self._undo = self._fresh, False, True, _nothing
        for handle, (states, made) in zip(handles[self._returns :], self._targets, strict=True):
            for cell in states:
                cell.handle = handle
            for ref in made:
                cell_ = ref()
                if cell_ is not None:
                    if fresh:
                        cell_.set(handle)
                    else:
                        cell_.handle = handle
        for leaf, grad in self._assigned:
            if leaf.grad is not grad:
                leaf.grad = grad


def _nothing() -> None:
    """There is nothing to undo."""


def type_of(leaf: torch.Tensor) -> TensorType:
    """The type of an argument: a distributed tensor's own, else replicated."""
    if isinstance(leaf, DistributedTensor):
        return leaf.tensor_type
    return TensorType(leaf.dtype, tuple(leaf.shape))
