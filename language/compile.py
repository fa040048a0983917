"""From a graph to something that runs: the compiler's door, and the order in which a plan takes its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from monarch.compiler.config import settings
from monarch.compiler.graph import Graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.tracing import is_watched

Compile = Callable[[Graph], Plan]

_compile: Compile | None = None


def compile_graph(
    graph: Graph,
    *,
    report: bool = False,
    eager: bool = False,
    memory_limit: int | None = None,
    rounding: str = "eager",
    collectives: str = "monarch",
    target: str = "cpu",
    cuda_graphs: bool = False,
) -> Plan:
    """The plan of a traced graph, with which a worker holds at most `memory_limit` bytes; `report` fills what the
    inspector shows of it. Ops that were recorded outside of any program (`eager`) get generated kernels only where all
    do: who tries things out should not wait for a compiler."""
    if _compile is not None:
        return _compile(graph)
    from monarch.compiler import pipeline

    # A trace is read with the report of what it measured.
    return pipeline.compile_graph(
        graph,
        report=report or is_watched(),
        kernels="off" if eager and settings.kernels == "auto" else None,
        memory_limit=memory_limit,
        rounding=rounding,
        collectives=collectives,
        target=target,
        cuda_graphs=cuda_graphs,
    )


def partition_graph(graph: Graph) -> Graph:
    from monarch.compiler import pipeline

    return pipeline.partition_graph(graph)


@contextmanager
def compiling_with(compile: Compile) -> Iterator[None]:
    """Compile with another compiler within a block: a test's, or one with other passes."""
    global _compile
    before, _compile = _compile, compile
    try:
        yield
    finally:
        _compile = before
