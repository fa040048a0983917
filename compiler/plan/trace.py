"""What a plan's steps took on the workers: measured spans. `monarch.compiler.inspect.trace` keeps them in a file.

All times are nanoseconds on one clock, from the trace's start. It is CLOCK_MONOTONIC, which is one clock for all
processes of a host; a mesh over several hosts will subtract each host's offset where `runtime/controller/recorder.py`
takes the trace's start from what a worker says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch.compiler.layout import MeshSpec
from monarch.compiler.plan.plan import Plan

COMMANDS = ("trace", "compile", "load", "put", "run", "fetch", "wait")
HANDLED = (
    *("load", "put", "fetch", "free", "unload", "lend", "adopt", "copy"),
    *("snapshot", "go back", "leave", "check replicas", "save", "read files", "fault"),
)


@dataclass(frozen=True)
class Span:
    """One instruction of one step on one worker.

    `instruction`  its place among the plan's; their number itself for a commit that the step makes behind the last one
    `held`         what the worker held when the instruction was done, before what is freed behind it was given back,
                   in bytes: the distinct storages of state, inputs, and values of the plan
    `waited`       of a collective, the nanoseconds in which this worker waited for its peers
    """

    instruction: int
    start: int
    end: int
    held: int
    waited: int = 0


@dataclass(frozen=True)
class Step:
    """One run of a plan on one worker; its command reached the worker at `start`. `plan` indexes `Trace.plans`;
    `number` is the command's. A step that failed has the spans up to there."""

    plan: int
    number: int
    worker: int
    start: int
    end: int
    spans: tuple[Span, ...]
    failed: bool = False


@dataclass(frozen=True)
class Command:
    """Something that the controller did, one of COMMANDS. `label` is the plan's or the value's name, and `number` that
    of the command to the workers: a run's is that of its steps. What asks nothing of them ("trace" and "compile", of a
    program) has -1."""

    kind: str
    label: str
    start: int
    end: int
    number: int = -1


@dataclass(frozen=True)
class Handled:
    """A command other than a run, one of HANDLED, as one worker carried it out."""

    kind: str
    number: int
    worker: int
    start: int
    end: int


@dataclass(frozen=True)
class TracedPlan:
    """A plan that ran while the trace was taken. `plan` is the plan itself where the trace was taken in this process;
    a trace from a file does not hold it."""

    name: str
    hash: str
    plan: Plan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Trace:
    """What `monarch.profile` and `monarchc profile` measured. `dropped` counts the earliest steps (of all workers) for
    which the workers' buffers had no room."""

    mesh: MeshSpec
    plans: tuple[TracedPlan, ...]
    steps: tuple[Step, ...]
    commands: tuple[Command, ...]
    handled: tuple[Handled, ...] = ()
    dropped: int = 0
