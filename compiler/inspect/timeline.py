"""Reading a trace: how long each value takes, the critical path of a step, and where the workers' time goes.

Pure functions of a trace and its plans. All times are nanoseconds.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from monarch.compiler.layout import MeshSpec
from monarch.compiler.ops import OPS
from monarch.compiler.plan.plan import Instruction, Plan
from monarch.compiler.plan.trace import Span, Step, Trace
from monarch.compiler.plan.waits import dims_of


@dataclass(frozen=True)
class Measured:
    """An instruction over all steps and workers: how often it ran, and medians of how long it took and how long it
    waited for peers in that."""

    instruction: int
    runs: int
    took: float
    waited: float


@dataclass(frozen=True)
class Stretch:
    """A part of a critical path: `worker` was at `instruction` (-1: between two, or before the first)."""

    worker: int
    instruction: int
    start: int
    end: int


@dataclass(frozen=True)
class Meeting:
    """A group of workers at a collective of one step: their spans by worker, in the order in which they came."""

    instruction: int
    spans: dict[int, Span]

    @property
    def last(self) -> int:
        """The worker for which the others waited."""
        return list(self.spans)[-1]

    @property
    def skew(self) -> int:
        """How long after the first worker the last one came."""
        starts = [span.start for span in self.spans.values()]
        return starts[-1] - starts[0]


@dataclass(frozen=True)
class Skew:
    """A collective of one group of workers over all steps: `last` came last most often, in `times` of `runs` steps;
    `late` is the median of how long after the first worker the last one came, whichever that was."""

    instruction: int
    workers: tuple[int, ...]
    last: int
    times: int
    runs: int
    late: float


@dataclass(frozen=True)
class Shares:
    """Where a worker's time went, from the first step's start to the last one's end. They add up to `total`.

    `compute`        in ops of its own
    `communication`  in collectives, moving data
    `waiting`        in collectives, waiting for peers
    `between`        in a step, but in no instruction
    `commands`       in other commands: put, fetch, load, free
    `idle`           with nothing to do: the controller had given no command yet
    """

    compute: int
    communication: int
    waiting: int
    between: int
    commands: int
    idle: int

    @property
    def total(self) -> int:
        return self.compute + self.communication + self.waiting + self.between + self.commands + self.idle


def steps_of(trace: Trace, plan: Plan) -> tuple[Step, ...]:
    """The steps that ran the plan (found by its hash), of all workers."""
    numbers = {at for at, traced in enumerate(trace.plans) if traced.plan is plan or traced.hash == plan.hash}
    return tuple(step for step in trace.steps if step.plan in numbers)


def measured(steps: Sequence[Step]) -> dict[int, Measured]:
    """By instruction, over steps of one plan. The instructions of a failed step count up to its failure."""
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    for step in steps:
        for span in step.spans:
            spans[span.instruction].append(span)
    return {
        number: Measured(
            number,
            len(found),
            statistics.median(span.end - span.start for span in found),
            statistics.median(span.waited for span in found),
        )
        for number, found in sorted(spans.items())
    }


def runs(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    """Steps of one plan, those of one command together, where no worker's is missing or failed."""
    by_number: defaultdict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_number[step.number].append(step)
    workers = {step.worker for step in steps}
    return [
        tuple(sorted(found, key=lambda step: step.worker))
        for _, found in sorted(by_number.items())
        if len(found) == len(workers) and not any(step.failed for step in found)
    ]


def length(run: Sequence[Step]) -> int:
    """Of one command's steps: from where the first worker begins to where the last one ends."""
    return max(step.end for step in run) - min(step.start for step in run)


def critical_path(run: Sequence[Step], plan: Plan) -> tuple[Stretch, ...]:
    """The critical path of one step, in order of time, without gaps: `run` has each worker's step.

    Followed back from the last instruction to end. Before an op comes the instruction before it on the same worker;
    a collective starts when the last of its group comes to it, so before it comes that worker's instruction.
    """
    steps = {step.worker: step for step in run if step.spans}
    if not steps:
        return ()
    places = {worker: {span.instruction: at for at, span in enumerate(step.spans)} for worker, step in steps.items()}
    worker = max(steps, key=lambda rank: steps[rank].spans[-1].end)
    at = len(steps[worker].spans) - 1
    path: list[Stretch] = []
    while True:
        span = steps[worker].spans[at]
        end, began = span.end, span.start
        dims = collective_dims(plan, span.instruction)
        if dims is not None:
            group = [r for r in plan.mesh.group(worker, dims) if r in steps and span.instruction in places[r]]
            last = max(group, key=lambda r: steps[r].spans[places[r][span.instruction]].start)
            arrived = steps[last].spans[places[last][span.instruction]].start
            if last != worker and arrived < end:
                path.append(Stretch(worker, span.instruction, arrived, end))
                worker, at, began = last, places[last][span.instruction], arrived
                end = arrived
        if began < end:
            path.append(Stretch(worker, span.instruction, began, end))
        before = steps[worker].spans[at - 1].end if at else steps[worker].start
        if before < began:
            path.append(Stretch(worker, -1, before, began))
        if not at:
            return tuple(path[::-1])
        at -= 1


def collective_dims(plan: Plan, instruction: int) -> tuple[str, ...] | None:
    """The mesh dims over which an instruction meets others: all of them for a commit, also for the one behind the last
    instruction; None for one that meets no others."""
    if instruction >= len(plan.instructions):
        return plan.mesh.names
    found: Instruction = plan.instructions[instruction]
    if found.op not in OPS or not OPS[found.op].collective:
        return None
    if found.op == "commit":
        return plan.mesh.names
    if found.op == "wait":
        return dims_of(plan, instruction)
    return tuple(found.kwargs["mesh_dims"] if "mesh_dims" in found.kwargs else found.args[1])


def meetings(steps: Sequence[Step], plan: Plan) -> Iterator[Meeting]:
    """The collectives of a plan's steps, commits among them, at which a whole group was seen: two workers or more."""
    workers = sorted({step.worker for step in steps})
    if len(workers) != plan.mesh.workers:  # no worker has seen which one is missing
        return
    dims = {at: collective_dims(plan, at) for at in range(len(plan.instructions) + 1)}
    # A part of a program runs on a mesh of its own, whose workers have other numbers there.
    groups = {
        at: {tuple(workers[rank] for rank in plan.mesh.group(rank, over)) for rank in range(len(workers))}
        for at, over in dims.items()
        if over is not None
    }
    seen: defaultdict[tuple[int, int], dict[int, Span]] = defaultdict(dict)
    for step in steps:
        for span in step.spans:
            if span.instruction in groups:
                seen[step.number, span.instruction][step.worker] = span
    for (_, instruction), spans in sorted(seen.items()):
        for group in sorted(groups[instruction]):
            if len(group) > 1 and all(worker in spans for worker in group):
                order = sorted(group, key=lambda worker: (spans[worker].start, worker))
                yield Meeting(instruction, {worker: spans[worker] for worker in order})


def skews(steps: Sequence[Step], plan: Plan) -> list[Skew]:
    """The workers that come late to the plan's collectives, the largest median first."""
    found: defaultdict[tuple[int, tuple[int, ...]], list[Meeting]] = defaultdict(list)
    for meeting in meetings(steps, plan):
        found[meeting.instruction, tuple(sorted(meeting.spans))].append(meeting)
    made = []
    for (instruction, workers), each in found.items():
        last, times = Counter(meeting.last for meeting in each).most_common(1)[0]
        late = statistics.median(meeting.skew for meeting in each)
        made.append(Skew(instruction, workers, last, times, len(each), late))
    return sorted(made, key=lambda skew: -skew.late)


def shares(trace: Trace, plans: Sequence[Plan | None]) -> dict[int, Shares]:
    """By worker. `plans[i]` is that of `trace.plans[i]`; instructions of a plan that is not known count as
    computing."""
    if not trace.steps:
        return {}
    first, last = min(step.start for step in trace.steps), max(step.end for step in trace.steps)
    found = {}
    meets = [
        set()
        if plan is None
        else {at for at in range(len(plan.instructions) + 1) if collective_dims(plan, at) is not None}
        for plan in plans
    ]
    for worker in sorted({step.worker for step in trace.steps}):
        compute = communication = waiting = between = 0
        for step in trace.steps:
            if step.worker != worker:
                continue
            inside = 0
            for span in step.spans:
                took = span.end - span.start
                inside += took
                if span.instruction in meets[step.plan]:
                    waiting += min(span.waited, took)
                    communication += took - min(span.waited, took)
                else:
                    compute += took
            between += step.end - step.start - inside
        commands = sum(
            max(0, min(each.end, last) - max(each.start, first)) for each in trace.handled if each.worker == worker
        )
        idle = last - first - (compute + communication + waiting + between + commands)
        found[worker] = Shares(compute, communication, waiting, between, commands, max(0, idle))
    return found


def coordinates(mesh: MeshSpec, worker: int) -> str:
    """`data=0, model=1`."""
    point = zip(mesh.names, mesh.point(worker), strict=True)
    return ", ".join(f"{name}={at}" for name, at in point) or "0"
