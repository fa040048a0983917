"""A trace as events of the Chrome trace event format, which Perfetto and chrome://tracing show.

The format: "Trace Event Format" (Google, document 1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Used of it are
complete events (X), which nest on a lane, counters (C), flows (s and f) and names (M); times are in microseconds.

    the controller    a process; lanes of its commands, as many as overlap (several threads may give commands)
    each worker       a process, named with its coordinates: its steps and other commands; compute; communication
    arrows            from a command to its step on each worker; and at a collective, from the worker that came last to
                      each that waited for it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from monarch.compiler.inspect.labels import Label, labels
from monarch.compiler.inspect.timeline import meetings
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.trace import Command, Handled, Step, Trace

STEPS, COMPUTE, COMMUNICATION = range(1, 4)
LANES = {STEPS: "steps and commands", COMPUTE: "compute", COMMUNICATION: "communication"}
CONTROLLER = 0

Event = dict[str, Any]


def events(trace: Trace, plans: Sequence[Plan | None]) -> Iterator[Event]:
    """The events of a trace; `plans[i]`, where there is one, names the instructions of `trace.plans[i]`. Spans of a
    lane are in order of time, and an outer before an inner one."""
    names = [None if plan is None else labels(plan) for plan in plans]
    yield from _process(CONTROLLER, "controller")
    commands = sorted(trace.commands, key=lambda command: (command.start, -command.end))
    lanes = _lanes(commands)
    for lane in range(1 + max(lanes, default=0)):
        yield _named("thread_name", CONTROLLER, 1 + lane, "commands" if lane == 0 else f"commands {lane + 1}")
    lane_of_run: dict[int, tuple[Command, int]] = {}
    for command, lane in zip(commands, lanes, strict=True):
        if command.kind == "run":
            lane_of_run[command.number] = (command, lane)
        yield _span(
            f"{command.kind} {command.label}",
            "command",
            CONTROLLER,
            1 + lane,
            command.start,
            command.end,
            number=command.number,
        )
    for worker, point in enumerate(trace.mesh.coordinates()):
        where = ", ".join(f"{name}={at}" for name, at in point.items())
        yield from _process(1 + worker, f"worker {worker}" + (f": {where}" if where else ""))
        for lane, name in LANES.items():
            yield _named("thread_name", 1 + worker, lane, name)
    flows = count()
    work: list[Step | Handled] = [*trace.steps, *trace.handled]
    for each in sorted(work, key=lambda each: (each.worker, each.start, -each.end)):
        if isinstance(each, Handled):
            yield _span(each.kind, "command", 1 + each.worker, STEPS, each.start, each.end, number=each.number)
        else:
            yield from _step(trace, each, names[each.plan])
            if each.number in lane_of_run:
                command, lane = lane_of_run[each.number]
                end = (1 + each.worker, STEPS, each.start)
                yield from _arrow("command", "command", next(flows), (CONTROLLER, 1 + lane, command.start), end)
    for at, (plan, known) in enumerate(zip(plans, names, strict=True)):
        if plan is None:
            continue
        for meeting in meetings([step for step in trace.steps if step.plan == at], plan):
            came = meeting.spans[meeting.last].start
            for worker, span in meeting.spans.items():
                if worker != meeting.last and came < span.end:
                    start, end = ((1 + each, COMMUNICATION, came) for each in (meeting.last, worker))
                    yield from _arrow(_label(known, meeting.instruction).name, "collective", next(flows), start, end)


def _step(trace: Trace, step: Step, names: Sequence[Label] | None) -> Iterator[Event]:
    pid = 1 + step.worker
    name = trace.plans[step.plan].name + (" (failed)" if step.failed else "")
    yield _span(name, "step", pid, STEPS, step.start, step.end, number=step.number)
    for span in step.spans:
        label = _label(names, span.instruction)
        args: Event = {"op": label.op, "type": label.type, "line": label.line, "module": label.module}
        args = {key: value for key, value in args.items() if value}
        if label.sent or label.moved:
            args["bytes"] = label.sent or label.moved
        if span.waited:
            args["waited for peers (us)"] = _us(span.waited)
        lane, kind = (COMMUNICATION, "communication") if label.is_collective else (COMPUTE, "compute")
        yield _span(label.name, kind, pid, lane, span.start, span.end, step=step.number, **args)
        yield {"ph": "C", "name": "memory", "pid": pid, "ts": _us(span.end), "args": {"bytes": span.held}}


def _label(names: Sequence[Label] | None, instruction: int) -> Label:
    if names is not None and instruction < len(names):
        return names[instruction]
    return Label(f"instruction {instruction}", "")


def _arrow(
    name: str, kind: str, number: int, start: tuple[int, int, int], end: tuple[int, int, int]
) -> Iterator[Event]:
    """Between spans, each given by process, lane and a time within it. An arrow has one end."""
    for phase, (pid, tid, at) in ({"ph": "s"}, start), ({"ph": "f", "bp": "e"}, end):
        yield {**phase, "name": name, "cat": kind, "id": number, "pid": pid, "tid": tid, "ts": _us(at)}


def _process(pid: int, name: str) -> Iterator[Event]:
    yield _named("process_name", pid, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, kind: str, pid: int, tid: int, start: int, end: int, **args: Any) -> Event:
    times = {"ts": _us(start), "dur": _us(end - start)}
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, **times, "args": args}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _lanes(commands: Sequence[Command]) -> list[int]:
    """The first lane for each, in which it overlaps none, or is wholly within all that it overlaps. `commands` are in
    order of their starts."""
    under_way: list[list[int]] = []  # the ends of each lane's, the outermost first
    lanes = []
    for command in commands:
        for ends in under_way:
            while ends and ends[-1] <= command.start:
                ends.pop()
        fitting = (lane for lane, ends in enumerate(under_way) if not ends or command.end <= ends[-1])
        lane = next(fitting, len(under_way))
        if lane == len(under_way):
            under_way.append([])
        under_way[lane].append(command.end)
        lanes.append(lane)
    return lanes
