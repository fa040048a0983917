"""The order that puts all that can fail before a step's commit."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate

from torch import fx

from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph
from monarch.compiler.ops.schema import viewed_operand
from monarch.compiler.schedule.failing import before_the_commit
from monarch.compiler.schedule.schedule import Schedule


class CommitLast(Pass):
    """Put the calls that can fail before those that write over state.

    %n = aten.sub.Tensor(%w, %d)                # over %w
    %m = aten.index_select(%y, 0, %i)
    -->
    %m = aten.index_select(%y, 0, %i)
    %n = aten.sub.Tensor(%w, %d)                # over %w

    Among the places for the commit it takes the one for which the fewest calls move. A call whose result something
    that can fail reads writes over no state (`Schedule` gives it memory of its own), so no call is wanted on both
    sides.
    """

    name = "commit-last"

    def run(self, graph: Graph, context: Context) -> Graph:
        calls = list(graph.calls)
        early = before_the_commit(calls)
        if not early:
            return graph
        position = {call: at for at, call in enumerate(calls)}
        updates = graph.updates
        replaced = {each for each in graph.placeholders if each.meta["label"] in updates}
        front = calls[: max(position[call] for call in early)]
        if not any(call not in early and _reads(call, replaced) for call in front):
            return graph
        late = _readers_of(calls, [calls[at] for at in Schedule(graph.copy()).state_writers])
        if not late or len(front) < min(position[call] for call in late):
            return graph
        moved_down = [0, *accumulate(call in late for call in calls)]
        moved_up = [0, *accumulate(call in early for call in calls)]
        places = range(len(calls), -1, -1)  # of equal ones the last, so that calls move least far
        at = min(places, key=lambda at: moved_down[at] + moved_up[-1] - moved_up[at])
        order = [
            *(call for call in calls[:at] if call not in late),
            *(call for call in calls[at:] if call in early),
            *(call for call in calls[:at] if call in late),
            *(call for call in calls[at:] if call not in early),
        ]
        for call in order:
            graph.fx.output_node().prepend(call)
        return graph


def _reads(call: fx.Node, values: Container[fx.Node]) -> bool:
    """Whether a call reads one of these, or a view of one."""
    for operand in call.all_input_nodes:
        while (viewed := viewed_operand(operand)) is not None:
            operand = viewed
        if operand in values:
            return True
    return False


def _readers_of(calls: Sequence[fx.Node], first: Iterable[fx.Node]) -> set[fx.Node]:
    """These calls and all that read their results."""
    found = set(first)
    for call in calls:
        if any(operand in found for operand in call.all_input_nodes):
            found.add(call)
    return found
