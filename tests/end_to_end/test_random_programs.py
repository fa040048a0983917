"""Some of the random programs of tests/compiler, run on real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given

import monarch  # noqa: F401  says how workers are started
from monarch.compiler.blocks import whole_of
from monarch.compiler.execution.executor import Executor
from monarch.compiler.execution.factories import executor_for
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.types import MeshSpec
from tests.compiler.programs import Program, programs
from tests.sample import examples


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[MeshSpec, Executor]]:
    """Meshes by their shape, started when first needed: an example costs a plan, not a process."""
    started: dict[MeshSpec, Executor] = {}
    yield started
    for executor in started.values():
        executor.close()


@examples(12, 60)
@given(program=programs(max_ops=10))
def test_workers_give_the_dense_results(meshes: dict[MeshSpec, Executor], program: Program) -> None:
    check(meshes, program)


@examples(8, 30)
@given(program=programs(max_ops=10, max_workers=4, uneven=True))
def test_workers_give_the_dense_results_for_sizes_that_they_do_not_divide(
    meshes: dict[MeshSpec, Executor], program: Program
) -> None:
    check(meshes, program)


def check(meshes: dict[MeshSpec, Executor], program: Program) -> None:
    mesh = program.graph.mesh
    if mesh not in meshes:
        meshes[mesh] = executor_for(mesh)
    executor = meshes[mesh]
    plan = compile_graph(program.graph)
    arguments = [executor.put(program.values[spec.label], spec.type) for spec in plan.inputs]
    outputs = executor.run(plan, arguments)
    expected = {("return", i): value for i, value in enumerate(program.returns)}
    dense = {node.name: value for node, value in program.made}
    expected |= {("state", label): dense[node.name] for label, node in program.graph.updates.items()}
    for spec, handle in zip(plan.outputs, outputs, strict=True):
        got = whole_of(executor.shards(handle), spec.type, mesh)
        torch.testing.assert_close(got, expected[spec.kind, spec.label], equal_nan=True)
