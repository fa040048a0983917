"""The eager door: ops outside a program are recorded, and run as an implicit program when a value is needed.

Plans are kept by the tape, so a training loop compiles in its first iterations and then reuses its plans; floats
among the arguments of pointwise ops are inputs of the plan, so that an optimizer's changing numbers make no new one.
Tensors that are still alive when the tape runs are its results; those that Python has dropped are not computed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from monarch.compiler.config import settings
from monarch.compiler.execution.executor import Handle
from monarch.compiler.passes.capture import Value
from monarch.compiler.passes.functionalize import functionalize
from monarch.compiler.plan import Plan
from monarch.language.compile import compile_graph, eager_options
from monarch.language.mesh import Mesh
from monarch.language.recording import Recording, turns
from monarch.language.tensor import Cell


@dataclass(frozen=True)
class _Compiled:
    """A plan, and which of the tape's values each of its outputs is (several may share one output)."""

    plan: Plan
    states: dict[str, list[str]]


_plans: OrderedDict[Any, _Compiled] = OrderedDict()


def flush(mesh: Mesh) -> None:
    """Run what was recorded on `mesh`. Returns at once; a failure on the workers is raised where its results are
    needed. What is interrupted before the workers have been given it stays recorded."""
    with turns:
        mesh.settle()
        while (recording := mesh._pending) is not None:
            live = [(cell, value) for ref, value in recording.made if (cell := ref()) is not None]
            try:
                _run(mesh, recording, live)
            except Exception as error:
                if mesh._pending is not recording:  # a signal's handler has run it meanwhile
                    return
                for cell, _ in live:
                    cell.error = error
                _ran(mesh, recording)
                raise


def _ran(mesh: Mesh, recording: Recording) -> None:
    mesh._pending = None
    recording.release()


def _run(mesh: Mesh, recording: Recording, live: list[tuple[Cell, Value]]) -> None:
    """Run a recording, unless a signal's handler has added to it meanwhile, or has run it."""
    tape = recording.tape
    length = len(tape.ops)
    cells: dict[str, Cell] = {}
    updates: dict[str, Value] = {}
    for entry, state in zip(tape.inputs, recording.states.values(), strict=True):
        cells[str(entry.label)] = state.cell
        updates[str(entry.label)] = state.value
    for index, (cell, value) in enumerate(live):
        cells[f"made{index}"] = cell
        updates[f"made{index}"] = value
    key = (mesh.spec, tape.key, tuple(op.source for op in tape.ops), tuple(value for _, value in live))
    compiled = _plans.get(key)
    if compiled is None:
        graph, aliases = functionalize(tape, name="eager", mesh=mesh.spec, returns=[], updates=updates)
        if not graph.updates:
            _ran(mesh, recording)
            return
        compiled = _Compiled(compile_graph(graph, eager_options()), _groups(aliases))
        _plans[key] = compiled
        if len(_plans) > settings.eager_plans:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    arguments: list[Any] = []
    for spec in compiled.plan.inputs:
        if spec.kind == "scalar":
            arguments.append(recording.scalars[str(spec.label)])
        else:
            arguments.append(cells[str(spec.label)].handle)
    mesh.keep(state.cell for state in recording.states.values())
    plan, states = compiled.plan, compiled.states

    def bind(handles: list[Handle]) -> None:
        if mesh._pending is not recording:
            return
        for spec, handle in zip(plan.outputs, handles, strict=True):
            label = str(spec.label)
            for name in (label, *states.get(label, ())):
                cells[name].set(handle)
        _ran(mesh, recording)

    if mesh._pending is recording and len(tape.ops) == length:
        mesh.executor.run(plan, arguments, bind)


def _groups(aliases: dict[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for alias, label in aliases.items():
        groups.setdefault(label, []).append(alias)
    return groups


def cached_plans() -> int:
    """How many eager plans are kept."""
    return len(_plans)
