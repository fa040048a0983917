"""Facts about a plan's values that several views need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.loading import load
from monarch.compiler.plan.transfers import moved_bytes
from monarch.compiler.states import StateKey

if TYPE_CHECKING:
    from monarch.compiler.layout import MeshSpec
    from monarch.compiler.plan.plan import Plan
    from monarch.compiler.plan.report import Collectives, Report, ReportedValue
    from monarch.compiler.tensor_type import TensorType


def report_of(plan: Plan) -> Report:
    """The plan's report. Raises MonarchError where it was compiled without one."""
    if plan.report is None:
        raise MonarchError(
            f"plan '{plan.name}' has no report: it was made only to be run",
            hint="compile it with monarchc compile or program.compile().",
        )
    return plan.report


def computed(plan: Plan) -> list[ReportedValue]:
    """The values that are computed: no inputs, no parts of another op's results, and no kernels, whose ops stand for
    them."""
    return [
        value for value in report_of(plan).values if value.instruction >= 0 and value.op not in ("getitem", "kernel")
    ]


def ops_of(plan: Plan) -> list[ReportedValue]:
    """One value for each op that is computed: of one with several results, taken out of a kernel, the first."""
    values = computed(plan)
    again = further_results(plan, values)
    return [value for number, value in enumerate(values) if number not in again]


def further_results(plan: Plan, values: Sequence[ReportedValue]) -> set[int]:
    """Which of these are a second or later result of an op in a kernel, which gives each as a value of its own."""
    several = plan.costs.get("several")
    if type(several) is not list:  # `costs` is free JSON
        several = load("monarch.compiler.report:several_results")(report_of(plan))
    seen: set[tuple[object, ...]] = set()
    found = set()
    for number, value in enumerate(values):
        if value.kernel < 0:
            continue
        key = value.kernel, value.op, value.module, value.source, value.phase
        if value.op in several and key in seen:
            found.add(number)
        seen.add(key)
    return found


def collectives_of(plan: Plan) -> list[Collectives]:
    """The collectives of a step, by the value that runs them."""
    return [each for value in report_of(plan).values for each in value.collectives]


def where(plan: Plan, value: ReportedValue) -> str:
    """`train.py:12`, or "" where the value has no line."""
    source = source_of(plan, value)
    return f"{source.file.rsplit('/', 1)[-1]}:{source.line}" if source is not None else ""


def source_of(plan: Plan, value: ReportedValue) -> Source | None:
    return plan.sources[value.source] if 0 <= value.source < len(plan.sources) else None


def line_of(plan: Plan, source: Source) -> str:
    """The text of a line of the plan's, "" where it is not known."""
    lines = report_of(plan).lines
    return lines[plan.sources.index(source)].strip() if source in plan.sources else ""


def types_text(value: ReportedValue) -> str:
    return ", ".join("none" if type_ is None else str(type_) for type_ in value.types)


def kernel_of(plan: Plan, value: ReportedValue) -> str:
    """The text of a generated kernel, "" where a value is none."""
    if value.op != "kernel" or plan.instructions[value.instruction].op != "kernel":
        return ""
    return str(plan.instructions[value.instruction].args[1])


def kernel_name(text: str) -> str:
    """A kernel's own name, from its text: many calls can be of one kernel."""
    return text.partition("(")[0].removeprefix("kernel ").strip()


def call_of(plan: Plan, value: ReportedValue) -> str:
    """A value's call for people: a kernel by its name, without its text."""
    text = kernel_of(plan, value)
    if not text:
        return value.call
    values = report_of(plan).values
    return f"kernel {kernel_name(text)}({', '.join(f'%{values[read].name}' for read in value.reads)})"


def transfers_of(plan: Plan) -> list[dict[str, Any]]:
    """The transfers between the meshes of a program, in order; the bytes are those of all workers together."""
    return [
        {
            "name": transfer.name,
            "from": plan.parts[transfer.source].name,
            "to": plan.parts[transfer.target].name,
            "sent": str(transfer.sent.unpadded),
            "received": str(transfer.received.unpadded),
            "bytes": moved_bytes(plan.routes(number), transfer.sent.dtype.itemsize),
            "line": "" if transfer.line is None else str(transfer.line),
        }
        for number, transfer in enumerate(plan.transfers)
    ]


def local_bytes(type: TensorType, mesh: MeshSpec) -> int:
    """A worker's bytes of a tensor."""
    return type.dtype.itemsize * math.prod(type.local_shape(mesh))


def kind_of(label: str) -> str:
    """The kind of a state, by the name that programs give it: "weights", "gradients" or "optimizer state"."""
    return {"parameter": "weights", "gradient": "gradients"}.get(kind := StateKey.of(label).kind, kind)
