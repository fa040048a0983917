"""A plan and a trace as the JSON that the page reads (`web/data.ts` has the same fields, with their types).

Columns instead of objects, and each text and type once: 20,000 ops are a few megabytes, and parsed in a moment.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.differences import UNITS, differences
from monarch.compiler.inspect.labels import schedule_text
from monarch.compiler.inspect.overview import overview
from monarch.compiler.inspect.timeline import Stretch, critical_path, measured, runs, steps_of
from monarch.compiler.inspect.values import call_of, further_results, kernel_of, transfers_of
from monarch.compiler.kernels.cpp.emit import emit as emit_cpp
from monarch.compiler.kernels.triton.emit import emit as emit_triton
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.report import PHASES, Decision, Report, ReportedValue
from monarch.compiler.plan.trace import Step, Trace
from monarch.compiler.tensor_type import TensorType

T = TypeVar("T", bound=Hashable)

SPANS = 400_000
"""How many spans of a trace go into a page: the last steps, as many as fit (at least one)."""
_PLAIN = ("name", "source", "sent", "flops", "moved", "allocates", "frees", "seconds", "instruction", "kernel")
"""The columns that hold a value's fields as they are."""


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
    again = further_results(plan, values)
    columns = {
        "op": [texts(value.op) for value in values],
        "call": [call_of(plan, value) for value in values],
        "reads": _reads(values),
        "types": [[-1 if type_ is None else types(type_) for type_ in value.types] for value in values],
        "module": [texts(value.module) for value in values],
        "phase": [PHASES.index(value.phase) for value in values],
        "traced": [texts(value.traced) for value in values],
        "why": [texts(value.why) for value in values],
        "decisions": [[decisions(decision) for decision in value.decisions] for value in values],
        "dims": [[dims[name] for name in value.mesh_dims] for value in values],
        "within": [
            [[texts(e.op), [dims[name] for name in e.mesh_dims], e.count, e.sent, e.seconds] for e in value.within]
            for value in values
        ],
        **{name: [getattr(value, name) for value in values] for name in _PLAIN},
        "again": [int(number in again) for number in range(len(values))],
    }
    return {
        "name": plan.name,
        "hash": plan.hash,
        "target": plan.target,
        "madeFor": plan.made_for,
        "mesh": plan.mesh.dims,
        "values": columns,
        "decisions": [_decision(decision, dims, texts) for decision in decisions.entries],
        "types": [_type(type_, dims) for type_ in types.entries],
        "sources": _sources(plan, report, texts),
        "outputs": _outputs(plan, values),
        "texts": texts.entries,
        "kernels": [
            [number, text, kernel_source(text, plan.target)]
            for number, value in enumerate(values)
            if (text := kernel_of(plan, value))
        ],
        "passes": plan.costs.get("seconds", {}),
        "overview": asdict(overview(plan)),
    }


def _reads(values: Sequence[ReportedValue]) -> list[tuple[int, ...]]:
    """The operands of each value; of a kernel also the values that only it computes and reads, so that an edge leads
    on."""
    read = {number for value in values for number in value.reads}
    found = [value.reads for value in values]
    for number, value in enumerate(values):
        if number < value.kernel and number not in read:
            found[value.kernel] += (number,)
    return found


def several_data(plan: Plan) -> dict[str, Any]:
    """The page's part for a plan of several meshes: the ops of each, their transfers in a step (with the bytes that all
    workers receive), and a pipeline's schedule, where it is known. Raises MonarchError where a part has no report."""
    facts = plan.costs.get("schedule")
    return {
        "schedule": schedule_text(facts),
        "bubble": facts["bubble"] if schedule_text(facts) and isinstance(facts, dict) else 0.0,
        "parts": [
            {"name": part.name, "workers": part.place.ranks(), "plan": plan_data(part.plan)} for part in plan.parts
        ],
        "transfers": [each | {"type": each["received"]} for each in transfers_of(plan)],
    }


def kernel_source(text: str, target: str) -> str:
    """A kernel's text for a target, with the user's lines beside it: C++ or Triton."""
    kernel = parse_kernel(text)
    return emit_cpp([kernel], lines=True) if target == "cpu" else emit_triton(kernel, lines=True).text


def comparison_data(before: Plan, plan: Plan) -> dict[str, Any]:
    """The changes from `before` to `plan`, as `monarchc diff --json` has them. Raises MonarchError where one of them
    has no report."""
    heads = [{"name": each.name, "mesh": str(each.mesh), "target": each.target} for each in (before, plan)]
    return {"before": heads[0], "now": heads[1], "units": UNITS, **asdict(differences(before, plan))}


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
        type_.dtype_name,
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


def _outputs(plan: Plan, values: tuple[ReportedValue, ...]) -> list[list[Any]]:
    """The results of the step, as [value, "return" or "state", label]."""
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
    """The measurements of `plan`; None where no step of it was finished by all workers.

    Times are nanoseconds. `instructions` has the medians over all steps, as [instruction, took, waited]. Of the last
    steps each is [number, workers' parts, critical path]; a part is [worker, start, end, spans], and spans lie flat,
    five numbers each: instruction, start from the end of the one before, duration, waited, bytes held. The critical
    path lies flat too, four numbers each: worker, instruction (-1 for none), start, end.
    """
    steps = steps_of(trace, plan)
    complete = runs(steps)
    if not complete:
        return None
    kept: list[tuple[Step, ...]] = []
    room = SPANS
    for run in reversed(complete):
        room -= sum(len(step.spans) for step in run)
        if kept and room < 0:
            break
        kept.insert(0, run)
    first = min(step.start for step in kept[0])
    return {
        "runs": len(complete),
        "instructions": [[each.instruction, each.took, each.waited] for each in measured(steps).values()],
        "steps": [
            [run[0].number, [_part(step, first) for step in run], _path(critical_path(run, plan), first)]
            for run in kept
        ],
    }


def _part(step: Step, first: int) -> list[Any]:
    flat: list[int] = []
    before = step.start
    for span in step.spans:
        flat += [span.instruction, span.start - before, span.end - span.start, span.waited, span.held]
        before = span.end
    return [step.worker, step.start - first, step.end - first, flat]


def _path(path: tuple[Stretch, ...], first: int) -> list[int]:
    return [number for each in path for number in (each.worker, each.instruction, each.start - first, each.end - first)]
