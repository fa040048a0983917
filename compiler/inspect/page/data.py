"""A plan and a trace as the JSON that the page reads (`web/data.ts` has the same fields, with their types).

Columns instead of objects, and each text and type once: 20,000 ops are a few megabytes, and parsed in a moment.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.trace import Step, Trace
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.report import PHASES, Decision, Report, Value
from monarch.compiler.types import DTYPE_NAMES, TensorType

T = TypeVar("T", bound=Hashable)

SPANS = 400_000
"""How many spans of a trace go into a page: the last steps, as many as fit (at least one)."""


class _Table(Generic[T]):
    """Distinct entries, each with a number."""

    def __init__(self) -> None:
        self.numbers: dict[T, int] = {}

    def __call__(self, entry: T) -> int:
        return self.numbers.setdefault(entry, len(self.numbers))

    @property
    def entries(self) -> list[T]:
        return list(self.numbers)


def plan_data(plan: Plan) -> dict[str, Any]:
    """The plan's part of the page. Raises MonarchError where it has no report."""
    if plan.report is None:
        raise MonarchError(
            f"the plan '{plan.name}' has no report, which the page shows",
            hint="plans compiled only to be run have none: make this one with Program.compile() or monarchc compile.",
        )
    report = plan.report
    texts: _Table[str] = _Table()
    types: _Table[TensorType] = _Table()
    decisions: _Table[Decision] = _Table()
    dims = {name: at for at, name in enumerate(plan.mesh.names)}
    values = report.values
    columns = {
        "name": [value.name for value in values],
        "op": [texts(value.op) for value in values],
        "call": [value.call for value in values],
        "reads": [value.reads for value in values],
        "types": [[-1 if type_ is None else types(type_) for type_ in value.types] for value in values],
        "source": [value.source for value in values],
        "module": [texts(value.module) for value in values],
        "phase": [PHASES.index(value.phase) for value in values],
        "traced": [texts(value.traced) for value in values],
        "why": [texts(value.why) for value in values],
        "decisions": [[decisions(decision) for decision in value.decisions] for value in values],
        "dims": [[dims[name] for name in value.mesh_dims] for value in values],
        "sent": [value.sent for value in values],
        "flops": [value.flops for value in values],
        "moved": [value.moved for value in values],
        "allocates": [value.allocates for value in values],
        "frees": [value.frees for value in values],
        "seconds": [value.seconds for value in values],
        "instruction": [value.instruction for value in values],
    }
    return {
        "name": plan.name,
        "hash": plan.hash,
        "target": plan.target,
        "mesh": plan.mesh.dims,
        "values": columns,
        "decisions": [_decision(decision, dims, texts) for decision in decisions.entries],
        "types": [_type(type_, dims) for type_ in types.entries],
        "sources": _sources(plan, report, texts),
        "outputs": _outputs(plan, values),
        "texts": texts.entries,
        "passes": plan.costs.get("seconds", {}),
    }


def _decision(decision: Decision, dims: dict[str, int], texts: _Table[str]) -> list[Any]:
    return [
        dims[decision.mesh_dim],
        texts(decision.rule),
        texts(decision.factor),
        texts(decision.why),
        decision.causes,
        [[texts(alternative.text), alternative.extra] for alternative in decision.alternatives],
        int(decision.exact),
    ]


def _type(type_: TensorType, dims: dict[str, int]) -> list[Any]:
    layout = type_.layout
    return [
        DTYPE_NAMES[type_.dtype],
        type_.dtype.itemsize,
        type_.shape,
        [[dims[name] for name in names] for names in layout.shards],
        [[dims[name], reduction] for name, reduction in layout.partial],
        [dims[name] for name in layout.varying],
        str(type_),
    ]


def _sources(plan: Plan, report: Report, texts: _Table[str]) -> list[list[Any]]:
    lines = [*report.lines, *[""] * (len(plan.sources) - len(report.lines))]
    return [
        [texts(source.file), source.line, source.column, source.end_column, line]
        for source, line in zip(plan.sources, lines, strict=False)
    ]


def _outputs(plan: Plan, values: tuple[Value, ...]) -> list[list[Any]]:
    """What becomes of values after the step, as [value, "return" or "state", label]."""
    made = {value.instruction: number for number, value in enumerate(values) if value.instruction >= 0}
    inputs = {spec.slot: spec for spec in plan.inputs}
    named = {(v.op, v.call): number for number, v in enumerate(values) if v.instruction < 0}
    lies: dict[int, int] = {}
    for slot, spec in inputs.items():
        call = f'state "{spec.label}"' if spec.kind == "state" else f"{spec.kind} {spec.label}"
        if (number := named.get((spec.kind, call))) is not None:
            lies[slot] = number
    for at, instruction in enumerate(plan.instructions):
        if instruction.out >= 0 and at in made:
            lies[instruction.out] = made[at]
    return [[lies[spec.slot], spec.kind, str(spec.label)] for spec in plan.outputs if spec.slot in lies]


def trace_data(trace: Trace, plan: Plan) -> dict[str, Any] | None:
    """What was measured of `plan`; None where the trace has no step of it.

    Times are nanoseconds. A step is [number, worker, start, end, spans], and its spans lie flat, four numbers each:
    instruction, start from the end of the one before, duration, bytes held.
    """
    numbers = {at for at, traced in enumerate(trace.plans) if traced.hash == plan.hash}
    steps = [step for step in trace.steps if step.plan in numbers]
    if not steps:
        return None
    runs: dict[int, list[Step]] = {}
    for step in steps:
        runs.setdefault(step.number, []).append(step)
    kept: list[Step] = []
    for number in sorted(runs, reverse=True):
        if kept and sum(len(step.spans) for step in kept + runs[number]) > SPANS:
            break
        kept += runs[number]
    kept.sort(key=lambda step: (step.number, step.worker))
    first = min(step.start for step in kept)
    return {
        "mesh": trace.mesh.dims,
        "runs": len(runs),
        "steps": [_step(step, first) for step in kept],
        "commands": [
            [command.kind, command.label, command.start - first, command.end - first]
            for command in trace.commands
            if command.end >= first
        ],
    }


def _step(step: Step, first: int) -> list[Any]:
    flat: list[int] = []
    before = step.start
    for span in step.spans:
        flat += [span.instruction, span.start - before, span.end - span.start, span.held]
        before = span.end
    return [step.number, step.worker, step.start - first, step.end - first, flat]
