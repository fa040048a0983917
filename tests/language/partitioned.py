"""An executor that runs partitioned graphs, worker by worker, in this process: layouts without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from monarch.compiler.execution.factories import executors_by
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import partition_graph, run_passes
from monarch.compiler.plan import Plan
from monarch.language import Mesh
from monarch.language.compile import compiling_with
from tests.language.dense import DenseExecutor, compile_dense


def compile_partitioned(kernels: bool) -> Callable[[Graph], Plan]:
    def compiled(graph: Graph) -> Plan:
        graph = partition_graph(graph)
        return compile_dense(run_passes(graph, ["fuse-kernels"]) if kernels else graph)

    return compiled


@contextmanager
def partitioned_mesh(kernels: bool = False, **dims: int) -> Iterator[Mesh]:
    """A mesh whose programs are partitioned, with `kernels` fused, and run by the reference executor."""
    with executors_by(DenseExecutor), compiling_with(compile_partitioned(kernels)), Mesh(**dims) as mesh:
        yield mesh
