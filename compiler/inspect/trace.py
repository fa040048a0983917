"""What a plan's steps took on the workers: measured spans, and the Chrome trace file that holds them.

All times are nanoseconds on one clock, from the trace's start.
"""

from __future__ import annotations

from dataclasses import dataclass

from monarch.compiler.types import MeshSpec


@dataclass(frozen=True)
class Span:
    """One instruction of one step on one worker. `held` is what the worker held behind it, in bytes: state, inputs
    and values of the plan."""

    instruction: int
    start: int
    end: int
    held: int


@dataclass(frozen=True)
class Step:
    """One run of a plan on one worker; its command reached the worker at `start`. `plan` indexes `Trace.plans`."""

    plan: int
    number: int
    worker: int
    start: int
    end: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Command:
    """Something that the controller did: "load", "put", "run", "fetch". `label` is the plan's or the value's name."""

    kind: str
    label: str
    start: int
    end: int


@dataclass(frozen=True)
class TracedPlan:
    """A plan that ran while the trace was taken: its name and its hash."""

    name: str
    hash: str


@dataclass(frozen=True)
class Trace:
    """What `monarch.profile` and `monarchc profile` measured."""

    mesh: MeshSpec
    plans: tuple[TracedPlan, ...]
    steps: tuple[Step, ...]
    commands: tuple[Command, ...]
