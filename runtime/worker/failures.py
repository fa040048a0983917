"""The report of a step that failed on a worker: which op of the plan, from which line of the user's."""

from __future__ import annotations

import traceback

from monarch.compiler.local_ops import AnomalyFound
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.loaded import LoadedPlan, describe

_OPERANDS = 16


def explain(rank: int, step: int, plan: LoadedPlan, error: Exception, committed: bool) -> Report:
    """The report of an error that a step of `plan` has raised on this worker."""
    if isinstance(error, AnomalyFound):
        return _anomaly(rank, step, plan, error)
    report = Report(
        "failed",
        rank,
        step,
        error=describe(error),
        traceback="".join(traceback.format_exception(error)),
        committed=committed,
    )
    locate(report, plan, error)
    return report


def _anomaly(rank: int, step: int, plan: LoadedPlan, found: AnomalyFound) -> Report:
    """Say which value of the plan has an anomaly, and on which worker."""
    looking = next(each for each in plan.instructions if each.op == "find_anomaly" and each.args[1] == found.number)
    _, _, op, text, inf, _ = looking.args
    what = "a NaN or an infinity" if inf else "a NaN"
    what = f"was given {what}, in {text}" if text else f"made {what}, the step's first, in {op}"
    source = plan.sources[looking.source] if looking.source >= 0 else None
    where = plan.ranks[found.worker]
    return Report("failed", rank, step, op=op, source=source, anomaly=what, where=where)


def locate(report: Report, plan: LoadedPlan, error: Exception) -> None:
    """Note from which op of the plan an error comes, and from which line of the user's."""
    place = plan.frame.place(error.__traceback__)
    if place is not None:
        # As the plan has it, also where a GPU runs a kernel for it.
        report.op = plan.instructions[place.number].op if place.whole else place.instruction.op
        report.operands = tuple(place.operands[:_OPERANDS])
        if 0 <= place.instruction.source < len(place.plan.sources):
            report.source = place.plan.sources[place.instruction.source]
