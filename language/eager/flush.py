"""The eager door: ops outside a program are recorded, and run as an implicit program when a value is needed.

Plans are kept by the tape, so a training loop compiles in its first iterations and then reuses its plans; floats
among the arguments of pointwise ops are inputs of the plan, so that an optimizer's changing numbers make no new one.
Tensors that are still alive when the tape runs are its results; those that Python has dropped are not computed.

An op that fails is raised where its result is needed, and spoils nothing else: the rest of the tape is run again
without what PyTorch, which raises at once, would not have come to.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from monarch.compiler.config import settings
from monarch.compiler.errors import AnomalyError, DeviceMeshError
from monarch.compiler.execution.executor import Bind, Handle, TakeBack
from monarch.compiler.ops import check
from monarch.compiler.passes.functionalize import functionalize
from monarch.compiler.plan import Plan
from monarch.compiler.schedule.failing import can_fail
from monarch.compiler.tape import Tape, Value
from monarch.language.compile import compile_graph, compiler_now, eager_options
from monarch.language.eager.failures import drop_gradients, first_failed, without
from monarch.language.recorder.optimizer_state import OptimizerSnapshot
from monarch.language.recorder.recording import Recording, turns
from monarch.language.recorder.varying import plainly
from monarch.language.tensors.cell import Cell, Failure
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import default_dtype


@dataclass(frozen=True)
class _Compiled:
    """A plan, the tape's value of each of its outputs (several values may share one output), and whether it may fail
    for its arguments' values."""

    plan: Plan
    states: dict[str, list[str]]
    can_fail: bool


_plans: OrderedDict[Any, _Compiled] = OrderedDict()

_FAILED = (RuntimeError, IndexError)
"""The errors that workers raise, and those of an executor that runs a plan at once."""


def flush(mesh: Mesh, program: str = "") -> None:
    """Run the ops recorded on `mesh`. Waits for them only where an op may fail for its operands' values; such a failure
    is raised where its results are needed, and here that of a check, which has none. Ops of an interrupted call that
    the workers have not got stay recorded.

    Raises DeviceMeshError where the mesh is lost. Before the call of a `program`, which is then the step that fails,
    what was recorded stays so: it runs once the mesh is healed. Otherwise it is what fails, and is not applied."""
    with turns, plainly():
        mesh.settle()
        while (recording := mesh.pending) is not None:
            live = [(cell, value) for ref, value in recording.made if (cell := ref()) is not None]
            try:
                with default_dtype(recording.dtype):
                    failed = _run(mesh, recording, live, program)
            except _Kept as kept:
                raise kept.error from None
            except Exception as error:
                if mesh.pending is not recording:  # a signal's handler has run it meanwhile
                    return
                for cell, _ in live:
                    cell.failure = Failure(error)
                    cell.failure.raised = True
                _ran(mesh, recording)
                raise
            if failed is not None:
                raise failed


class _Kept(Exception):
    """The mesh is lost, and the recorded ops stay recorded."""

    def __init__(self, error: DeviceMeshError) -> None:
        self.error = error


def discard(mesh: Mesh, error: DeviceMeshError) -> None:
    """Drop the ops recorded on `mesh` that have not run yet: they are not applied, and their results raise this
    error."""
    with turns:
        if (recording := mesh.pending) is not None:
            live = [(cell, value) for ref, value in recording.made if (cell := ref()) is not None]
            job = _Job(mesh, recording, live)
            _ran(mesh, recording)
            _undo(job, error)


def _ran(mesh: Mesh, recording: Recording) -> None:
    mesh.pending = None
    recording.release()


class _Job:
    """A tape that is run, and what belongs to it: `cells` and `updates` by label, the scalars, the handles from before
    by the states' labels, and the optimizers that were about to step when so many ops had been recorded."""

    def __init__(self, mesh: Mesh, recording: Recording, live: list[tuple[Cell, Value]]) -> None:
        self.mesh = mesh
        self.tape = replace(recording.tape, ops=list(recording.tape.ops))
        self.scalars = recording.scalars
        self.steps = recording.steps
        self.generator = recording.generator
        self.states = list(recording.states.values())
        self.cells: dict[str, Cell] = {}
        self.updates: dict[str, Value] = {}
        for entry, state in zip(self.tape.inputs, self.states, strict=True):
            self.cells[str(entry.label)] = state.cell
            self.updates[str(entry.label)] = state.value
        for index, (cell, value) in enumerate(live):
            self.cells[f"made{index}"] = cell
            self.updates[f"made{index}"] = value
        self.before = {label: self.cells[label].handle for label in map(str, (i.label for i in self.tape.inputs))}

    def compile(self, tape: Tape, updates: dict[str, Value]) -> _Compiled | None:
        """The plan of a part of the tape; None where nothing is to be done."""
        graph, aliases = functionalize(tape, name="eager", mesh=self.mesh.spec, returns=[], updates=updates)
        if not graph.updates:
            return None
        failing = any(can_fail(call) for call in graph.calls)
        anomaly = self.mesh._anomaly
        with self.mesh.spending("compile", graph.name):
            plan = compile_graph(graph, eager_options(anomaly))
        return _Compiled(plan, _groups(aliases), failing or bool(anomaly))

    def run(self, compiled: _Compiled, bind: Bind | None) -> list[Handle]:
        arguments: list[Any] = []
        small = [str(spec.label) for spec in compiled.plan.inputs if spec.kind == "state" and spec.type.ndim == 0]
        self.mesh.separate([self.cells[label] for label in small], list(self.cells.values()))
        for spec in compiled.plan.inputs:
            label = str(spec.label)
            arguments.append(self.scalars[label] if spec.kind == "scalar" else self.before[label])
        handles = self.mesh.executor.run(compiled.plan, arguments, bind)
        if compiled.can_fail:
            self.mesh.executor.wait(handles[0])
        return handles

    def failure_of(self, label: str) -> Exception | None:
        """Why there is no such state, where the step that was to make it failed; the cell then has the former value, if
        there is one."""
        handle = self.before[label]
        assert handle is not None
        try:
            self.mesh.fetch(handle, lambda executor: executor.wait(handle))
        except DeviceMeshError as error:
            return error
        return None

    def bind(self, compiled: _Compiled, handles: list[Handle]) -> None:
        for spec, handle in zip(compiled.plan.outputs, handles, strict=True):
            label = str(spec.label)
            names = (label, *compiled.states.get(label, ()))
            for name in names:
                self.cells[name].set(handle)
            if len(names) > 1:
                self.mesh.share(self.cells[name] for name in names)


def _run(mesh: Mesh, recording: Recording, live: list[tuple[Cell, Value]], program: str) -> Exception | None:
    """Run a recording, unless a signal's handler has added to it meanwhile, or has run it. Gives the error of a check
    that was the first to fail, or that of the mesh's being lost. Raises _Kept."""
    length = len(recording.tape.ops)
    job = _Job(mesh, recording, live)
    tape = job.tape
    sources = tuple(op.source for op in tape.ops)
    made_by = compiler_now(), mesh.spec, mesh._anomaly, recording.dtype
    key = (made_by, tape.key, sources, tuple(value for _, value in live))
    compiled = _plans.get(key)
    if compiled is None:
        compiled = job.compile(tape, job.updates)
        if compiled is None:
            _ran(mesh, recording)
            return None
        _plans[key] = compiled
        if len(_plans) > settings.eager_plans:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    mesh.keep(state.cell for state in job.states)

    made = [weakref.ref(job.cells[label]) for label in job.updates if label not in job.before]

    def undo(dropped: bool) -> None:
        if dropped:
            _take_back(steps, generator, {id(cell) for ref in made if (cell := ref()) is not None})

    steps, generator = job.steps, job.generator

    def bind(handles: list[Handle]) -> TakeBack | None:
        if mesh.pending is recording:
            job.bind(compiled, handles)
            _ran(mesh, recording)
        return undo

    if mesh.pending is recording and len(recording.tape.ops) == length:
        recording.sent = True
        try:
            job.run(compiled, bind)
        except _FAILED as error:
            if program and isinstance(error, DeviceMeshError) and error.mesh_lost and mesh.pending is recording:
                raise _Kept(error.knowing(program=program)) from None
            _ran(mesh, recording)
            return _undo(job, error)
    return None


def _undo(job: _Job, error: Exception) -> Exception | None:
    """After a failure, have every tensor as PyTorch would have left it when it raised at the failed op's line. Tensors
    that were made anew, and do not depend on the failed op, get their values; the others note the failure. Gives the
    error of the first failed op if it is a check, and that of a lost mesh or of an anomaly."""
    for label, cell in job.cells.items():
        cell.handle = job.before.get(label)
        cell.placed = cell.handle is not None
    lost_mesh = isinstance(error, DeviceMeshError) and error.mesh_lost
    if lost_mesh or isinstance(error, AnomalyError):  # nothing of it is applied
        made = [cell for label, cell in job.cells.items() if label not in job.before]
        for cell in made:
            cell.failure, cell.recording = Failure(error), None
        _take_back(job.steps, job.generator, set(map(id, made)))
        return error
    lost: set[Value] = set()  # inputs that an earlier step was to make
    for entry in job.tape.inputs:
        if (earlier := job.failure_of(str(entry.label))) is not None:
            lost.add(entry.value)
            error = earlier
    tape, updates, steps = job.tape, job.updates, job.steps
    failures: dict[Value, Failure] = {}
    checked: Exception | None = None
    while True:
        failed = -1
        failure = Failure(error)
        if not lost:
            wanted = [*updates.values(), *(op.out for op in tape.ops if op.func is check)]
            failed = first_failed(tape, wanted, getattr(error, "source", None), partial(_probe, job, failure))
            if tape.ops[failed].func is check and not failures:
                checked, failure.raised = failure.error, True
        tape, gone, valued = without(tape, failed, lost)
        failures |= dict.fromkeys(gone, failure)
        updates = {label: value for label, value in updates.items() if value in valued}
        for position, snapshot in steps:
            if position > failed:
                snapshot.restore_state()
        steps = []  # failures from here on are behind them
        try:
            compiled = job.compile(tape, updates)
            if compiled is not None:
                job.bind(compiled, job.run(compiled, None))
            break
        except _FAILED as another:
            error = another
            if lost or any(job.failure_of(label) is not None for label in job.before):  # the mesh is lost
                failures = dict.fromkeys(job.updates.values(), Failure(error))
                break
    missing = set()
    for label, value in job.updates.items():
        if value in failures:
            cell = job.cells[label]
            cell.failure = failures[value]
            if cell.handle is None:
                cell.recording = None
                missing.add(id(cell))
    drop_gradients(missing)
    return checked


def _take_back(
    steps: Sequence[tuple[int, OptimizerSnapshot]], generator: torch.Tensor | None, made: Collection[int]
) -> None:
    """Have Python be as before a tape was recorded that is not applied: optimizers, gradients, by the ids of the cells
    that the tape made, and PyTorch's generator."""
    for _, snapshot in reversed(steps):
        snapshot.restore_state()
    drop_gradients(made)
    if generator is not None:
        torch.set_rng_state(generator)


def _probe(job: _Job, failure: Failure, part: Tape, values: list[Value]) -> bool:
    """Whether a part of the tape fails when these values are asked for. `failure` then has its error: the last part is
    the smallest that fails."""
    compiled = job.compile(part, {f"probe{index}": value for index, value in enumerate(values)})
    try:
        if compiled is not None:
            job.run(compiled, None)
    except _FAILED as found:
        failure.error = found
        return True
    return False


def _groups(aliases: dict[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for alias, label in aliases.items():
        groups.setdefault(label, []).append(alias)
    return groups


def cached_plans() -> int:
    """How many eager plans are kept."""
    return len(_plans)
