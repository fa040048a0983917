"""An executor that runs partitioned graphs, worker by worker, in this process: layouts without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from monarch.compiler.execution.factories import executors_by
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import partition_graph, run_passes
from monarch.compiler.plan import Plan
from monarch.compiler.symbols import Scope
from monarch.language import Mesh
from monarch.language.compile import compiling_with
from tests.language.dense import DenseExecutor, compile_dense


def compile_partitioned(kernels: bool) -> Callable[[Graph], Plan]:
    def compiled(graph: Graph) -> Plan:
        graph = partition_graph(graph)
        return compile_dense(run_passes(graph, ["fuse-kernels"]) if kernels else graph)

    return compiled


COMPILED: list[str] = []
"""The names of the programs of named sizes that were compiled, each as often."""


class GraphTemplate:
    """A partitioned graph of named sizes, in the place of a plan's template."""

    def __init__(self, graph: Graph, scope: Scope, kernels: bool) -> None:
        COMPILED.append(graph.name)
        graph = partition_graph(graph)
        self.graph = run_passes(graph, ["fuse-kernels"]) if kernels else graph
        self.scope = scope

    lowered = None

    def at(self, values: Mapping[str, int], again: bool = False) -> Plan:
        return compile_dense(self.graph.at(values))


@contextmanager
def partitioned_mesh(kernels: bool = False, **dims: int) -> Iterator[Mesh]:
    """A mesh whose programs are partitioned, with `kernels` fused, and run by the reference executor."""
    compiling = compiling_with(compile_partitioned(kernels), partial(GraphTemplate, kernels=kernels))
    with executors_by(DenseExecutor), compiling, Mesh(**dims) as mesh:
        yield mesh
