"""A step at a glance: where its time goes, what sets the peak of memory, the lines that cost most, the model's blocks,
and verdicts in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.cost.machine import Machine
from monarch.compiler.inspect.blocks import Block, blocks_of
from monarch.compiler.inspect.costs import costs_by
from monarch.compiler.inspect.estimate import Estimate, estimate
from monarch.compiler.inspect.memory import alive_by_layer
from monarch.compiler.inspect.values import computed, report_of, where
from monarch.compiler.inspect.verdicts import Verdict, room_of, verdicts
from monarch.compiler.plan import Plan, ReportedValue
from monarch.compiler.plan.report import peak

_LINES = 5


@dataclass(frozen=True)
class Line:
    """A line of the user's: `name` is "train.py:12", `code` its text; its cost for a worker in a step."""

    name: str
    code: str
    seconds: float
    sent: int
    held: int


@dataclass(frozen=True)
class WorkerMemory:
    """A worker's peak: `held` bytes, by `kinds`, the largest first, reached at `value`, on the line `where`; `there`
    are the bytes that it may have on `machine` (None where none is known)."""

    held: int
    kinds: dict[str, int]
    value: str
    where: str
    there: int | None
    machine: str


@dataclass(frozen=True)
class Overview:
    """One step of one worker.

    `seconds`   the estimate of its length, which is the sum of `time`
    `time`      its parts: "arithmetic" and "memory traffic" (of the ops that one or the other bounds), then
                "waiting for …" by mesh dims
    `hidden`    seconds of collectives that pass while the worker computes
    """

    seconds: float
    time: dict[str, float]
    hidden: float
    memory: WorkerMemory
    lines: tuple[Line, ...]
    blocks: tuple[Block, ...]
    verdicts: tuple[Verdict, ...]


def overview(plan: Plan) -> Overview:
    """The page's first view. Raises MonarchError for a plan without a report."""
    cluster = cluster_of(plan.target)
    found = estimate(plan, cluster)
    arithmetic = sum(value.computing for value in computed(plan) if _is_arithmetic(value, cluster.machine))
    time = {"arithmetic": arithmetic, "memory traffic": max(0.0, found.computing - arithmetic)}
    time |= {f"waiting for {dims}": seconds for dims, seconds in found.waiting.items()}
    return Overview(
        found.seconds,
        {name: seconds for name, seconds in time.items() if seconds},
        round(max(0.0, sum(found.communicating.values()) - sum(found.waiting.values())), 12),
        _memory(plan, found),
        tuple(
            Line(row["name"], row["code"], row["computing"] + row["communicating"], row["sent"], row["peak_bytes"])
            for row in costs_by(plan, "line")
            if "code" in row
        )[:_LINES],
        blocks_of(plan),
        verdicts(plan, found),
    )


def _is_arithmetic(value: ReportedValue, machine: Machine) -> bool:
    """Whether an op takes as long as its operations do, and not as long as its bytes."""
    dtype = next((type_.dtype_name for type_ in value.types if type_ is not None), "f32")
    return value.flops / machine.rate(dtype) > value.moved / machine.memory


def _memory(plan: Plan, found: Estimate) -> WorkerMemory:
    kinds: Counter[str] = Counter()
    for row in alive_by_layer(plan).values():
        kinds.update(row)
    _, at = peak(plan)
    value = report_of(plan).values[at] if at >= 0 else None
    room = room_of(plan)
    return WorkerMemory(
        found.peak,
        {kind: held for kind, held in kinds.most_common() if held > 0},
        value.name if value else "",
        where(plan, value) if value else "",
        None if room is None else room.bytes,
        "" if room is None else room.machine,
    )
