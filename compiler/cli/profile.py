"""`monarchc profile`: run a script, or a plan, and see where its workers' time went."""

from __future__ import annotations

import runpy
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from monarch.compiler.cli import feed
from monarch.compiler.cli.load import import_file, users_errors
from monarch.compiler.cli.look import is_program
from monarch.compiler.cli.options import GROUPS, STEPS
from monarch.compiler.cli.run import check_machine, numbers, run_steps
from monarch.compiler.cli.screen import console, count, duration, heading, line, plain, print_json, size, table
from monarch.compiler.errors import MonarchError, ProgramError
from monarch.compiler.execution.factories import executor_for
from monarch.compiler.inspect.labels import Label, labels
from monarch.compiler.inspect.profile import Profile
from monarch.compiler.inspect.timeline import (
    Measured,
    Stretch,
    coordinates,
    critical_path,
    length,
    measured,
    runs,
    shares,
    skews,
    steps_of,
)
from monarch.compiler.plan import Plan
from monarch.compiler.plan.file import load_plan
from monarch.compiler.plan.trace import Step, Trace

_ROWS = 15
_WIDE = 48


def profile(
    what: str,
    arguments: list[str] | None,
    out: Path,
    by: str,
    steps: int | None,
    inputs: Path | None,
    scalar: list[str] | None,
    fill: str,
    as_json: bool,
) -> None:
    """Run a script or a plan, and print and write the measurements."""
    if by not in GROUPS:
        raise MonarchError(f"--by {by!r}: the table can be by {', '.join(GROUPS)}")
    measured = Profile(out)
    status = 0
    try:
        if is_program(what):
            if steps is not None or inputs is not None or scalar:
                raise MonarchError("--steps, --inputs and --scalar are for plans", hint=f"{what} is a script.")
            with measured:
                status = _run_script(what, arguments or [])
        else:
            if arguments:
                raise MonarchError(f"arguments are for scripts, and {what} is a plan", hint="see --inputs, --scalar.")
            _run_plan(measured, Path(what), steps or STEPS, inputs, scalar, fill)
    finally:
        # Also when the script failed: the steps until then were measured.
        if as_json and measured.traces:
            print_json([_summary(trace, path) for trace, path in zip(measured.traces, measured.paths, strict=True)])
        elif not as_json:
            for trace, path in zip(measured.traces, measured.paths, strict=True):
                _show(trace, path, by, None if is_program(what) else what)
    if not measured.traces:
        raise MonarchError(f"{what} ran nothing on a mesh", hint="there is nothing to measure.")
    if status:
        typer.echo(f"monarchc: {what} exited with status {status}", err=True)
        raise typer.Exit(1)


# -- running -----------------------------------------------------------------------------------------------------------


def _run_script(what: str, arguments: Sequence[str]) -> int:
    """Run it as `python FILE.py ARG…` would; gives the status that it exits with."""
    name, colon, function = what.rpartition(":") if not what.endswith(".py") else (what, "", "")
    file = Path(name)
    if not file.is_file():
        raise ProgramError(f"{file} {'is a folder' if file.is_dir() else 'does not exist'}")
    with _as_main(file, arguments), users_errors(f"running {what}"):
        try:
            if not colon:
                runpy.run_path(str(file), run_name="__main__")
                return 0
            call = getattr(import_file(file), function, None)
            if not callable(call):
                raise ProgramError(f"{file.name} has no function '{function}'")
            call()
        except SystemExit as left:
            if left.code is None or isinstance(left.code, int):
                return left.code or 0
            typer.echo(str(left.code), err=True)
            return 1
    return 0


@contextmanager
def _as_main(file: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _run_plan(
    measured: Profile, path: Path, steps: int, inputs: Path | None, scalar: list[str] | None, fill: str
) -> None:
    plan = load_plan(path)
    check_machine(plan, None)
    fed = feed.feed(plan, feed.read_tensors(inputs), numbers(scalar), fill)
    feed.restart_seeds(0)
    with measured:
        executor = executor_for(plan.mesh)
        try:
            run_steps(executor, plan, fed, steps)
        finally:
            executor.close()


# -- measurements --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """Instructions that belong together: how many, nanoseconds a step (a worker's median), the estimate for that (-1:
    none), and a remark."""

    name: str
    notes: tuple[str, str, str]
    count: int
    took: float
    waited: float
    estimate: float
    is_collective: bool


def _rows(labels: Sequence[Label], found: dict[int, Measured], by: str) -> list[_Row]:
    """Sorted, what takes longest first."""
    keys: dict[str, Callable[[int, Label], Any]] = {
        "value": lambda number, label: number,
        "op": lambda number, label: label.op,
        "module": lambda number, label: label.module or "(no module)",
        "line": lambda number, label: label.line or "(no line)",
    }
    grouped: defaultdict[Any, list[tuple[Label, Measured]]] = defaultdict(list)
    for number, one in found.items():
        if number < len(labels):
            grouped[keys[by](number, labels[number])].append((labels[number], one))
    rows = []
    for key, members in grouped.items():
        first = members[0][0]
        estimates = [label.estimate for label, _ in members]
        rows.append(
            _Row(
                first.name if by == "value" else str(key),
                (first.op, first.line, first.module) if by == "value" else ("", "", ""),
                len(members),
                sum(one.took for _, one in members),
                sum(one.waited for _, one in members),
                -1.0 if min(estimates) < 0 else sum(estimates),
                first.is_collective,
            )
        )
    return sorted(rows, key=lambda row: -row.took)


def _longest(path: Sequence[Stretch]) -> dict[int, int]:
    """The nanoseconds of a critical path by instruction, the longest first."""
    found: defaultdict[int, int] = defaultdict(int)
    for stretch in path:
        found[stretch.instruction] += stretch.end - stretch.start
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _middle(runs: Sequence[tuple[Step, ...]]) -> tuple[Step, ...]:
    """The run of median length."""
    return sorted(runs, key=length)[len(runs) // 2]


def _measured_plans(trace: Trace) -> list[tuple[Plan, tuple[Step, ...]]]:
    """The plans with their steps, that which took the most time first."""
    found = [(traced.plan, steps_of(trace, traced.plan)) for traced in trace.plans if traced.plan is not None]
    return sorted(found, key=lambda each: -sum(step.end - step.start for step in each[1]))


def _summary(trace: Trace, path: Path) -> dict[str, Any]:
    plans = []
    for plan, steps in _measured_plans(trace):
        names, whole = labels(plan), runs(steps)
        path_ns = _longest(critical_path(_middle(whole), plan)) if whole else {}
        plans.append(
            {
                "name": plan.name,
                "hash": plan.hash,
                "steps": len({step.number for step in steps}),
                "failed": len({step.number for step in steps if step.failed}),
                "seconds": [length(run) / 1e9 for run in whole],
                "held_bytes": max((span.held for step in steps for span in step.spans), default=0),
                "values": [
                    {
                        "name": names[number].name,
                        "op": names[number].op,
                        "line": names[number].line,
                        "module": names[number].module,
                        "runs": one.runs,
                        "seconds": one.took / 1e9,
                        "waited_seconds": one.waited / 1e9,
                        "estimated_seconds": None if names[number].estimate < 0 else names[number].estimate,
                        "sent_bytes": names[number].sent,
                    }
                    for number, one in measured(steps).items()
                    if number < len(names)
                ],
                "skew": [
                    {
                        "name": names[skew.instruction].name,
                        "workers": list(skew.workers),
                        "last": skew.last,
                        "times": skew.times,
                        "runs": skew.runs,
                        "seconds": skew.late / 1e9,
                    }
                    for skew in skews(steps, plan)
                ],
                "critical_path": [
                    {"name": "" if number < 0 else names[number].name, "seconds": took / 1e9}
                    for number, took in path_ns.items()
                ],
            }
        )
    return {
        "trace": str(path),
        "mesh": dict(trace.mesh.dims),
        "dropped": trace.dropped,
        "plans": plans,
        "workers": [
            {"worker": worker, **{key: value / 1e9 for key, value in vars(share).items()}}
            for worker, share in shares(trace, [traced.plan for traced in trace.plans]).items()
        ],
    }


def _show(trace: Trace, path: Path, by: str, plan_file: str | None) -> None:
    out = console()
    numbers = {step.number for step in trace.steps}
    line(out, plain(f"measured {count(len(numbers), 'step')}", "bold"), f"on {trace.mesh}")
    if trace.dropped:
        line(out, plain(f"  {count(trace.dropped, 'earlier step')} of workers had no room and is not shown", "yellow"))
    plans = _measured_plans(trace)
    _show_plans(out, plans)
    found = shares(trace, [traced.plan for traced in trace.plans])
    heading(out, "where the workers' time went", "first step to last")
    names = ("compute", "communication", "waiting", "between", "commands", "idle")
    table(
        out,
        ["worker", *(f">{name}" for name in names)],
        [
            (coordinates(trace.mesh, worker), *(_percent(getattr(share, name), share.total) for name in names))
            for worker, share in found.items()
        ],
    )
    for plan, steps in plans[:1]:
        _show_plan(out, plan, steps, by)
        _show_skews(out, trace, plan, steps)
    out.print()
    line(out, f"wrote {path}, {size(path.stat().st_size)}: open it at https://ui.perfetto.dev or chrome://tracing")
    if plan_file is not None:
        line(out, f"on the page: monarchc inspect {plan_file} --trace {path} --html page.html")


def _show_plans(out: Any, plans: Sequence[tuple[Plan, tuple[Step, ...]]]) -> None:
    rows = []
    for plan, steps in plans:
        whole = runs(steps)
        took = [length(run) / 1e9 for run in whole]
        failed = len({step.number for step in steps if step.failed})
        rows.append(
            (
                plan.name,
                len({step.number for step in steps}),
                duration(statistics.median(took)) if took else "",
                duration(sum(took)) if took else "",
                size(max((span.held for step in steps for span in step.spans), default=0)),
                f"{failed} failed" if failed else "",
            )
        )
    heading(out, "plans")
    table(out, ["~plan", ">steps", ">median step", ">together", ">a worker holds", ""], rows)


def _show_plan(out: Any, plan: Plan, steps: Sequence[Step], by: str) -> None:
    names, found, whole = labels(plan), measured(steps), runs(steps)
    rows = _rows(names, found, by)
    together = sum(row.took for row in rows) or 1.0
    more = f", the {_ROWS} longest of {len(rows)}" if len(rows) > _ROWS else ""
    heading(out, f"{plan.name} by {by}", f"a step of one worker, median{more}")
    notes = ["~op", "~line", "~module"] if by == "value" else [">ops"]
    table(
        out,
        [f"~{by}", *notes, ">measured", ">share", ">estimated"],
        [
            (
                row.name[:_WIDE],
                *(row.notes if by == "value" else (row.count,)),
                duration(row.took / 1e9),
                _percent(row.took, together),
                "" if row.estimate < 0 else duration(row.estimate),
            )
            for row in rows[:_ROWS]
        ],
    )
    if collectives := [row for row in _rows(names, found, "value") if row.is_collective]:
        heading(out, "collectives", "the longest first")
        table(
            out,
            ["~value", "~op", "~line", ">measured", ">of it waiting", ">estimated"],
            [
                (
                    row.name[:_WIDE],
                    row.notes[0],
                    row.notes[1],
                    duration(row.took / 1e9),
                    duration(row.waited / 1e9),
                    "" if row.estimate < 0 else duration(row.estimate),
                )
                for row in collectives[:8]
            ],
        )
    if not whole:
        return
    run = _middle(whole)
    path = critical_path(run, plan)
    workers = len({stretch.worker for stretch in path})
    heading(
        out,
        "critical path",
        f"of step {run[0].number}, {duration(length(run) / 1e9)}, through {count(workers, 'worker')}",
    )
    table(
        out,
        ["~value", "~op", ">on the path", ">share"],
        [
            (
                names[number].name[:_WIDE] if number >= 0 else "(between ops)",
                names[number].op if number >= 0 else "",
                duration(took / 1e9),
                _percent(took, length(run)),
            )
            for number, took in list(_longest(path).items())[:8]
        ],
    )


def _show_skews(out: Any, trace: Trace, plan: Plan, steps: Sequence[Step]) -> None:
    names = labels(plan)
    if found := skews(steps, plan):
        heading(out, "skew", "how long after the first worker the last one comes to a collective, median")
        table(
            out,
            ["~value", "~op", "~most often last", ">in steps", ">after the first"],
            [
                (
                    names[skew.instruction].name[:_WIDE],
                    names[skew.instruction].op,
                    coordinates(trace.mesh, skew.last),
                    f"{skew.times} of {skew.runs}",
                    duration(skew.late / 1e9),
                )
                for skew in found[:8]
            ],
        )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else ""
