"""`@monarch.program(layouts="auto")`: a traced graph in the cheapest layouts, where nobody has said any, and its plan.

What the user has said binds: only the states and inputs that `Graph.free` names are laid out anew. The plan says what
was found, in `Plan.costs["layouts"]` (`Answer.data`, and the machine's name).

The first step of a program makes an optimizer's state, which all others read: they hold more, and are what is paid for.
So layouts are searched for a step that has it (`with_made`), and hold for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from monarch.compiler.cost.cluster import Cluster, cluster_of, load_cluster
from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.events import say
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.pipeline import compile_graph, partition_graph
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.plan_cache import compile_kept
from monarch.compiler.search.find import Answer, find_layouts
from monarch.compiler.search.layouts import FoundLayouts, made
from monarch.compiler.sizes import format_seconds
from monarch.compiler.states import StateKey
from monarch.compiler.text import parse_layout
from monarch.compiler.types import TensorType

aten = torch.ops.aten


def compile_found(
    graph: Graph,
    options: CompileOptions,
    *,
    kept: bool = False,
    report: bool = False,
    progress: Callable[[str, float, Graph], None] | None = None,
    cluster: Cluster | None = None,
    binaries: bool = True,
    before: dict[str, Any] | None = None,
) -> Plan:
    """The plan of a traced graph in the layouts found; with `kept` that which another process has kept on disk, if
    there is one. `cluster` takes the place of the options' machine, and the others are `compile_graph`'s. `before` is
    what was found for the call before: where all states have their layouts, it holds for this one too, if it can.

    Raises LayoutError where nothing fits, and MonarchError for a graph whose layouts cannot be searched and a machine
    that is for another target."""
    options.check()
    on = cluster or _machine(options)
    if kept and not report:
        again = before and (before["inputs"], before["values"])
        compiled = partial(_compiled, on=on, before=before, report=False, progress=None, cluster=None, binaries=True)
        return compile_kept(graph, options, compiled, f"{on!r} {sorted(map(repr, graph.free))} {again}")
    on_it = cluster or (on if options.machine else None)
    return _compiled(graph, options, on, before, report=report, progress=progress, cluster=on_it, binaries=binaries)


def partition_found(graph: Graph, options: CompileOptions) -> Graph:
    """The graph in the layouts found, partitioned for its mesh."""
    laid, plain, _ = _searched(graph, options, _machine(options))
    return partition_graph(laid, plain)


def _compiled(
    graph: Graph, options: CompileOptions, on: Cluster, before: dict[str, Any] | None, **compiling: Any
) -> Plan:
    """`compiling` is how `compile_graph` is to do it."""
    for laid_out in (partial(_again, before=before), _searched):
        made = laid_out(graph, options, on)
        if made is None:
            continue
        laid, plain, found = made
        try:
            plan = compile_graph(laid, plain, **compiling)
        except MonarchError:
            if laid_out is _searched:
                raise
            continue  # what held for the call before takes too much for this one
        return replace(plan, costs={**plan.costs, "layouts": found}) if found else plan
    raise AssertionError("a search gives layouts, or raises")


_Made = tuple[Graph, CompileOptions, dict[str, Any]]
"""A graph in the layouts found, the options to compile it with, and what is said of the search."""


def _searched(graph: Graph, options: CompileOptions, on: Cluster) -> _Made:
    """By a search; what is said of it is {} where the mesh has one worker."""
    plain = replace(options, layouts="", machine="")
    if graph.mesh.workers == 1 and not graph.parts:
        return graph, plain, {}
    whole = with_made(graph)
    answer = find_layouts(whole, on, plain, bound=frozenset(_laid(whole) - whole.free))
    limit = plain.memory_limit or answer.options.memory_limit
    if whole.free & whole.states.keys():
        say("layouts", _text(graph, on, answer))
    found = {"machine": on.name, **answer.data}
    return answer.chosen.layouts.on(graph), replace(plain, memory_limit=limit), found


def _again(graph: Graph, options: CompileOptions, on: Cluster, before: dict[str, Any] | None) -> _Made | None:
    """What was found for the call before, where inputs and values are the same and all states are bound."""
    if not before or graph.free & graph.states.keys():
        return None
    inputs = {int(position): parse_layout(text) for position, text in before["inputs"].items()}
    values = {name: parse_layout(text) for name, text in before["values"].items()}
    dims = {node.meta["label"]: node.meta["type"].ndim for node in graph.inputs if node.meta["label"] in graph.free}
    made = {node.name: type_.ndim for node in graph.calls if isinstance(type_ := node.meta["type"], TensorType)}
    if not all(dims.get(position) == layout.ndim for position, layout in inputs.items()):
        return None
    if not all(made.get(name) == layout.ndim for name, layout in values.items()):
        return None
    limit = options.memory_limit or (before["limit"] if before["recomputed"] else None)
    plain = replace(options, layouts="", machine="", memory_limit=limit)
    return FoundLayouts({}, inputs, values).on(graph), plain, before


def with_made(graph: Graph) -> Graph:
    """The step in which what a step has made is there: an optimizer's state, which it holds all the time and reads. The
    argument is not changed."""
    graph = graph.copy()
    updates, states, free = graph.updates, graph.states, set(graph.free)
    first = next(iter(graph.fx.nodes))
    for label, node in made(graph):
        key, type_ = StateKey.of(label), node.meta["type"]
        if not key.owner or not type_.ndim:
            continue
        parameter = states.get(key.parameter)
        if parameter is not None and parameter.shape == type_.shape:
            type_ = type_.with_layout(parameter.layout)
        with graph.fx.inserting_before(first):
            state = graph.placeholder("state", label, type_)
        with graph.fx.inserting_before(graph.fx.output_node()):
            kept = graph.call(aten.add.Tensor, node, state, type=node.meta["type"], provenance=provenance(node))
        updates[label] = kept
        if key.parameter in free:
            free.add(label)
    graph.set_output(graph.returns, updates)
    graph.free = frozenset(free)
    return graph


def _laid(graph: Graph) -> set[str | int]:
    """The labels and positions of all that has a layout from outside."""
    return {node.meta["label"] for node in graph.placeholders if node.meta["kind"] in ("input", "state")}


def _machine(options: CompileOptions) -> Cluster:
    if not options.machine:
        return cluster_of(options.target)
    found = load_cluster(options.machine)
    if found.target != options.target:
        raise MonarchError(
            f"machine={options.machine!r} is for {found.target}, and the program is compiled for {options.target}",
            hint=f"say target={found.target!r} too, or name a machine for {options.target}.\n"
            "`monarchc sweep --auto` asks about machines that one does not have.",
        )
    return found


def _text(graph: Graph, on: Cluster, answer: Answer) -> str:
    more = "" if answer.exact else "; the solver's time was up, and there may be better ones"
    lines = "".join(f"\n  {text}" for text in answer.findings)
    return f"{graph.name}: {answer.chosen.name} for {on.name}, in {format_seconds(answer.seconds)}{more}{lines}"
