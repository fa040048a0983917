"""Events of compiling and running programs, typed: their source does not know its subscribers.

    Log            a line for people
    WorkersStatus  a mesh's workers have started, or run nothing any more
    Span           the controller has done something for a mesh
    Failure        a step has failed on the workers, or a mesh is lost
    Spawned        a mesh of processes or of actors has been spawned
    Status         an actor or a process has started, or has ended
    Handled        an actor has handled a message
    Fault          an actor has failed, and what owns it is told
    Timed          a block of the user's has run (`monarch.actor.span`)
    Metric         a number of the user's (`monarch.actor.get_meter`, `monarch.log`)

    stop = subscribe(sink, Span, Failure)
    ...
    stop()

A sink is called in the thread in which the event happens, and what it raises is raised there. It notes the event, and
uses no mesh, whose lock the thread may hold; only an executor that has started may it use. Where nobody
has subscribed, no event is made: who tells asks `heard` first. What workers measure of each instruction is no event: it
comes as a `Trace`, once it is asked for.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarch.compiler.config import settings
from monarch.compiler.errors import DeviceMeshError
from monarch.compiler.execution import watching
from monarch.compiler.execution.executor import Executor
from monarch.compiler.types import MeshSpec


@dataclass(frozen=True)
class Log:
    """A line for people. `topic` is "passes", "plan" or "commands", which MONARCH_LOG prints, or "kernels", "plans",
    "graphs" or "layouts", which is always printed. Hosts, actors and transports log to Python's loggers below
    "monarch"."""

    topic: str
    text: str


@dataclass(frozen=True)
class WorkersStatus:
    """The workers of an executor have been started; or they run nothing any more, because it is closed or they are
    lost."""

    executor: Executor
    is_running: bool


@dataclass(frozen=True)
class Span:
    """The controller has given the workers of a mesh a command, or waited for them: "load", "put", "run", "fetch",
    "wait"; or it has got a program ready for them: "trace", "compile". `number` is the command's, for a load the
    plan's, and -1 where workers were asked for nothing. Times are CLOCK_MONOTONIC's, in nanoseconds."""

    executor: Executor
    kind: str
    label: str
    start: int
    end: int
    number: int


@dataclass(frozen=True)
class Failure:
    """A step has failed on the workers of a mesh, or the mesh is lost: told when the controller next looks. `error` is
    raised where a result of the step is needed."""

    mesh: MeshSpec
    error: DeviceMeshError


@dataclass(frozen=True)
class Spawned:
    """A mesh has been spawned: of "processes" or of "actors" (`kind`), with these dims."""

    kind: str
    id: str
    name: str
    shape: str
    size: int


@dataclass(frozen=True)
class Status:
    """An actor ("Created", "Idle", "Stopped", "Failed") or a process ("Stopped", "Failed") has another status.

    `mesh`    the id of the mesh that it is in, and `rank` its place there
    `name`    for people: "trainers[3]", "procs gpus=3"
    `cls`     an actor's class, with its module
    `reason`  why it ended
    """

    kind: str
    mesh: str
    rank: int
    name: str
    status: str
    cls: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Handled:
    """An actor (`mesh` and `rank` as in `Status`) has handled a message. Times are CLOCK_MONOTONIC's, in nanoseconds.

    `queued`  how many messages waited behind it when it was done
    `well`    whether the endpoint returned
    """

    mesh: str
    rank: int
    actor: str
    endpoint: str
    sender: str
    start: int
    end: int
    queued: int
    well: bool


@dataclass(frozen=True)
class Fault:
    """An actor has failed, and its owner, anywhere in the program, gets that: `name` for people, why, and all known
    facts. Told in the program's own process. `before` it so many have failed without an event."""

    name: str
    reason: str
    text: str
    before: int = 0


@dataclass(frozen=True)
class Timed:
    """A block of the user's has run in this process, in `actor` ("": in none). Times are CLOCK_MONOTONIC's, in
    nanoseconds; `parent` is the number of the block around it, 0 where there is none."""

    name: str
    actor: str
    start: int
    end: int
    number: int
    parent: int


@dataclass(frozen=True)
class Metric:
    """A number: of an instrument ("counter", "up_down_counter", "histogram", "gauge"), or one that was logged ("log"),
    at `step`. `attributes` is JSON."""

    kind: str
    name: str
    value: float
    unit: str = ""
    attributes: str = "{}"
    step: int | None = None


Event = Log | WorkersStatus | Span | Failure | Spawned | Status | Handled | Fault | Timed | Metric
Sink = Callable[[Any], object]

_sinks: dict[type, tuple[Sink, ...]] = {}
_running: weakref.WeakSet[Executor] = weakref.WeakSet()


def subscribe(sink: Sink, *kinds: type[Event]) -> Callable[[], None]:
    """Have `sink` called with each event of these kinds from here on. Gives what ends that; to call it again changes
    nothing."""
    key = partial(sink)  # an object of its own, for a sink may subscribe twice
    for kind in kinds:
        _sinks[kind] = (*_sinks.get(kind, ()), key)

    def stop() -> None:
        for kind in kinds:
            _sinks[kind] = tuple(known for known in _sinks[kind] if known is not key)

    return stop


def _forget() -> None:
    """A forked process tells its own events: subscribers of its parent get none of them."""
    _sinks.clear()


if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=_forget)


def heard(kind: type[Event]) -> bool:
    """Whether anybody has subscribed to such events."""
    return bool(_sinks.get(kind))


def tell(event: Event) -> None:
    """Call all sinks that have subscribed to such events."""
    for sink in _sinks.get(type(event), ()):
        sink(event)


# -- lines for people ------------------------------------------------------------------------------------------------

_ON_REQUEST = frozenset({"passes", "plan", "commands"})


def wanted(topic: str) -> bool:
    """Whether a line on a topic would be printed, or told to anybody."""
    return topic not in _ON_REQUEST or topic in settings.log or heard(Log)


def say(topic: str, text: str) -> None:
    """Tell a line for people, and print it on standard error, unless its topic is one that MONARCH_LOG has to name."""
    if topic not in _ON_REQUEST or topic in settings.log:
        print(f"monarch: {text}", file=sys.stderr)
    if heard(Log):
        tell(Log(topic, text))


# -- executors -------------------------------------------------------------------------------------------------------


def started(executor: Executor) -> None:
    """An executor says that its workers have been started."""
    _running.add(executor)
    watching.begin()
    tell(WorkersStatus(executor, True))


def ended(executor: Executor) -> None:
    """An executor says that it is closed, or has lost a worker: it runs nothing any more."""
    if executor in _running:
        _running.discard(executor)
        tell(WorkersStatus(executor, False))


def running() -> list[Executor]:
    """The executors that have started, and not ended."""
    return list(_running)
