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
from monarch.compiler.passes.capture import Value
from monarch.compiler.passes.functionalize import functionalize
from monarch.compiler.plan import Plan
from monarch.language.compile import compile_graph, eager_options
from monarch.language.mesh import Mesh
from monarch.language.recording import Recording
from monarch.language.tensor import Cell


@dataclass(frozen=True)
class _Compiled:
    """A plan, and which of the tape's values each of its outputs is (several may share one output)."""

    plan: Plan
    states: dict[str, list[str]]


_plans: OrderedDict[Any, _Compiled] = OrderedDict()


def flush(mesh: Mesh) -> None:
    """Run what was recorded on `mesh`. Returns at once; a failure on the workers is raised where its results are
    needed."""
    recording = mesh._pending
    if recording is None:
        return
    mesh._pending = None
    live = [(cell, value) for ref, value in recording.made if (cell := ref()) is not None]
    try:
        _run(mesh, recording, live)
    except BaseException as error:
        for cell, _ in live:
            cell.error = error
        raise
    finally:
        recording.release()


def _run(mesh: Mesh, recording: Recording, live: list[tuple[Cell, Value]]) -> None:
    tape = recording.tape
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
    handles = mesh.executor.run(compiled.plan, arguments)
    for spec, handle in zip(compiled.plan.outputs, handles, strict=True):
        label = str(spec.label)
        for name in (label, *compiled.states.get(label, ())):
            cells[name].set(handle)


def _groups(aliases: dict[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for alias, label in aliases.items():
        groups.setdefault(label, []).append(alias)
    return groups


def cached_plans() -> int:
    """How many eager plans are kept."""
    return len(_plans)
