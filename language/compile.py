"""From a graph to something that runs: the compiler's door, and the order in which a plan takes its arguments."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch.compiler.config import settings
from monarch.compiler.execution.reports import reports_are_wanted
from monarch.compiler.graph import Graph
from monarch.compiler.loading import load
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.symbols import Scope

if TYPE_CHECKING:
    from monarch.compiler.schedule.template import Template

Compile = Callable[[Graph], Plan]

CompileTemplate = Callable[[Graph, Scope], Any]

_compile: Compile | None = None
_template: CompileTemplate | None = None


def compile_graph(
    graph: Graph,
    options: CompileOptions,
    *,
    report: bool = False,
    kept: bool = False,
    before: dict[str, Any] | None = None,
) -> Plan:
    """The plan of a traced graph; `report` adds the inspector's data, and without one the plan may be one that another
    process has `kept` on disk. Where layouts are to be found, `before` are those found for the call before."""
    if _compile is not None:
        return _compile(graph)
    report = report or reports_are_wanted()  # a trace is read with the report of the plan that it measured
    if options.layouts:
        door = load("monarch.compiler.search.door:compile_found")
        return door(graph, options, report=report, kept=kept, before=before)
    if kept and not report:
        return load("monarch.compiler.plan_cache:compile_kept")(graph, options)
    return load("monarch.compiler.pipeline:compile_graph")(graph, options, report=report)


def compile_template(graph: Graph, options: CompileOptions, scope: Scope) -> Template:
    """The plan of a traced graph of named sizes, for all that meet the conditions which the scope then has."""
    if _template is not None:
        return _template(graph, scope)
    return load("monarch.compiler.pipeline:compile_template")(graph, options, scope)


def compiles_templates() -> bool:
    """Whether what compiles here gives plans for all values of named sizes."""
    return _compile is None or _template is not None


def eager_options(anomaly: str = "") -> CompileOptions:
    """For ops that were recorded outside of any program, which get generated kernels only where all ops do: users who
    try things out should not wait for a compiler."""
    return CompileOptions(kernels="off" if settings.kernels == "auto" else None).looking_for(anomaly)


def partition_graph(graph: Graph, options: CompileOptions) -> Graph:
    """A traced graph, partitioned for its mesh."""
    found = options.layouts != ""
    by = "monarch.compiler.search.door:partition_found" if found else "monarch.compiler.pipeline:partition_graph"
    return load(by)(graph, options)


_collector: list[Callable[[], None]] = []
"""Restores the settings of Python's garbage collector, which differ meanwhile."""


@contextmanager
def full_collections_later() -> Iterator[None]:
    """Within the block Python's garbage collector looks only at new objects. Tracing, compiling and the first step make
    enough objects to have it go through all others several times, for 0.2 s each: torch has 400,000."""
    before = gc.get_threshold()
    within = (*before[:2], 1 << 30)

    def give_back() -> None:
        if gc.get_threshold() == within:  # the user's function may have changed it
            gc.set_threshold(*before)

    with _until(partial(gc.set_threshold, *within), give_back):
        yield


@contextmanager
def collected_later() -> Iterator[None]:
    """Within the block the garbage collector runs when it is called only. The finalizers of its objects would be taken
    for the program's own code, and their reads and writes for its reads and effects."""
    with _until(gc.disable, gc.enable if gc.isenabled() else gc.disable):
        yield


@contextmanager
def _until(begin: Callable[[], None], give_back: Callable[[], None]) -> Iterator[None]:
    _collector.append(give_back)
    try:
        begin()
        yield
    finally:
        if give_back in _collector:
            _collector.remove(give_back)
            give_back()


def collect_as_before() -> None:
    """Give the garbage collector its settings back, within these blocks, for code that looks at them."""
    while _collector:
        _collector.pop()()


def compiler_now() -> Compile | None:
    """The compiler within a block of `compiling_with`: plans of one compiler are not another's."""
    return _compile


@contextmanager
def compiling_with(compile: Compile, template: CompileTemplate | None = None) -> Iterator[None]:
    """Compile with another compiler within a block: a test's, or one with other passes. Without `template`, programs
    of named sizes are compiled for each of their values."""
    global _compile, _template
    before = _compile, _template
    _compile, _template = compile, template
    try:
        yield
    finally:
        _compile, _template = before
