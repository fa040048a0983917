"""An executor that runs partitioned graphs, worker by worker, in this process: layouts without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from monarch.compiler.execution.factories import executors_by
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import partition_graph, run_passes
from monarch.compiler.plan import Plan
from monarch.compiler.symbols import Scope, value_at
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

    def at(self, values: Mapping[str, int]) -> Plan:
        return compile_dense(graph_at(self.graph, values))


def graph_at(graph: Graph, values: Mapping[str, int]) -> Graph:
    """The graph where named sizes have these values."""
    found = graph.copy()
    for node in found.fx.nodes:
        if node.op == "output":
            continue
        types = node.meta["type"]
        several = types if isinstance(types, tuple) else (types,)
        made = tuple(type_ and type_.at(values) for type_ in several)
        node.meta["type"] = made if isinstance(types, tuple) else made[0]
        node.args, node.kwargs = value_at(tuple(node.args), values), value_at(dict(node.kwargs), values)
    return found


@contextmanager
def partitioned_mesh(kernels: bool = False, **dims: int) -> Iterator[Mesh]:
    """A mesh whose programs are partitioned, with `kernels` fused, and run by the reference executor."""
    compiling = compiling_with(compile_partitioned(kernels), partial(GraphTemplate, kernels=kernels))
    with executors_by(DenseExecutor), compiling, Mesh(**dims) as mesh:
        yield mesh
