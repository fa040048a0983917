"""The order in which a pipeline's stages work on microbatches, brought into a graph.

A program runs its microbatches one after the other, each through all stages. Their ops are a pure graph, of which every
topological order gives the same bits; the timetable chooses one. In each part it is the part's own order, and transfers
are numbered in it, so that no stage waits for another in a circle, whatever the timetable says.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, Provenance, provenance
from monarch.compiler.passes.rows import check_rows
from monarch.compiler.tape import Task, Timetable
from monarch.compiler.tape.timetable import BACKWARD, FORWARD, WEIGHTS

_BEFORE = -1
"""The place of ops that depend on no microbatch."""


def order_by_timetable(graph: Graph, timetable: Timetable) -> None:
    """Bring the ops of a graph into the order of a timetable, as far as their operands allow. `node.meta["task"]` says
    to which stage and microbatch an op belongs; one without follows its operands, as gradients' sums and an optimizer's
    step do. A transfer follows the action that makes its value. Raises ProgramError for a model that mixes the rows of
    a batch."""
    check_rows(graph)
    graph.schedule = timetable.facts
    places = _places(graph, timetable)
    calls = list(graph.calls)
    number = {node: at for at, node in enumerate(calls)}
    waiting = {node: len([each for each in node.all_input_nodes if each in number]) for node in calls}
    ready = [(places[node], number[node]) for node in calls if not waiting[node]]
    heapq.heapify(ready)
    last = graph.placeholders[-1] if graph.placeholders else graph.fx._root
    notes = _Notes(graph)
    while ready:
        node = calls[heapq.heappop(ready)[1]]
        if last.next is not node:
            last.append(node)
        last = node
        notes.note(node)
        for user in node.users:
            if user not in waiting:
                continue
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (places[user], number[user]))


class _Notes:
    """Lets the provenance of ops name their microbatch and stage: those of their task; without one the last microbatch
    that they follow from. An op on the mesh of another stage than its task's, as the way of a batch's rows to their
    stage is, belongs to the stage there."""

    def __init__(self, graph: Graph) -> None:
        tasks = Counter((node.meta["task"].stage, _mesh(node)) for node in graph.calls if "task" in node.meta)
        homes = {stage: mesh for (stage, mesh), _ in reversed(tasks.most_common())}
        self._stages: dict[str, list[int]] = {}
        for stage, mesh in sorted(homes.items()):
            self._stages.setdefault(mesh, []).append(stage)
        self._known: dict[tuple[Provenance, int | None, int | None], Provenance] = {}

    def note(self, node: fx.Node) -> None:
        task: Task | None = node.meta.pop("task", None)
        read = list(map(provenance, node.all_input_nodes))
        if task is not None:
            microbatch: int | None = task.microbatch
            stage = task.stage
        else:
            microbatch = max([each.microbatch for each in read if each.microbatch is not None], default=None)
            stage = max([each.stage for each in read if each.stage is not None], default=0)
        here = self._stages.get(_mesh(node), [])
        of = min(here, key=lambda each: abs(each - stage)) if here and (task or read or len(here) == 1) else None
        if microbatch is None and of is None:
            return
        key = provenance(node), microbatch, of
        if key not in self._known:
            self._known[key] = replace(key[0], microbatch=microbatch, stage=of)
        node.meta["provenance"] = self._known[key]


def _mesh(node: fx.Node) -> str:
    return node.meta.get("mesh", "")


def _places(graph: Graph, timetable: Timetable) -> dict[fx.Node, int]:
    """The place of each op in the order of everything."""
    on = timetable.places
    action = _actions(graph, timetable)
    sent: dict[fx.Node, int] = {}
    places: dict[fx.Node, int] = {}
    for node in graph.calls:
        of = action.get(node)
        if of is not None and node.target is not ops.transfer:
            places[node], sent[node] = on[of]
            continue
        read = node.all_input_nodes
        behind = sent if node.target is ops.transfer else places
        places[node] = max((behind.get(each, _BEFORE) for each in read), default=_BEFORE)
        sent[node] = max((sent.get(each, _BEFORE) for each in read), default=_BEFORE)
    return places


def _actions(graph: Graph, timetable: Timetable) -> dict[fx.Node, tuple[str, int, int]]:
    """For each op of a task its action in the stage. Where the timetable has the gradients of weights apart, they are
    those that no other stage's gradients need."""
    found: dict[fx.Node, tuple[str, int, int]] = {}
    passed_on: set[fx.Node] = set()
    for node in reversed(list(graph.calls)):
        task: Task | None = node.meta.get("task")
        if any(user in passed_on or _leaves(node, user, task) for user in node.users):
            passed_on.add(node)
        if task is None:
            continue
        if not provenance(node).backward:
            name = FORWARD
        else:
            name = BACKWARD if not timetable.is_split or node in passed_on else WEIGHTS
        found[node] = (name, task.stage, task.microbatch)
    return found


def _leaves(node: fx.Node, user: fx.Node, task: Task | None) -> bool:
    """Whether a value goes to another stage's backward pass."""
    other: Task | None = user.meta.get("task")
    if user.target is ops.transfer:
        return provenance(user).backward and other is not None
    return task is not None and other is not None and other[:2] != task[:2] and provenance(user).backward
