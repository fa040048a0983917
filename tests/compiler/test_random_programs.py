"""Random programs over random layouts and meshes of 1 to 8 workers agree with dense PyTorch."""

from __future__ import annotations

import torch
from hypothesis import given

from monarch.compiler import ops
from monarch.compiler.context import Context
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.waits import wrong_wait
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.schedule.overlap import OverlapCollectives
from monarch.compiler.text import parse_graph
from monarch.compiler.types import VARYING
from monarch.compiler.verify import verify
from tests.compiler.programs import Program, programs
from tests.compiler.reference import run_reference
from tests.sample import examples


@examples(50, 300)
@given(programs())
def test_partitioned_programs_give_the_dense_results(program: Program) -> None:
    partitioned = partition_graph(program.graph)
    returns, updates = run_reference(partitioned, program.values)
    for got, expected in zip(returns, program.returns, strict=True):
        torch.testing.assert_close(got, expected)
    dense = {node.name: value for node, value in program.made}
    for label, node in program.graph.updates.items():
        torch.testing.assert_close(updates[label], dense[node.name])


@examples(50, 300)
@given(programs(uneven=True))
def test_sizes_that_the_mesh_does_not_divide_give_the_dense_results(program: Program) -> None:
    """Whatever padding holds that the compiler does not define, it is NaN here, and nothing shows it."""
    partitioned = partition_graph(program.graph)
    verify(partitioned, run=True)
    assert str(parse_graph(str(partitioned))) == str(partitioned)
    returns, updates = run_reference(partitioned, program.values, poison=True)
    for got, expected in zip(returns, program.returns, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
    dense = {node.name: value for node, value in program.made}
    for label, node in program.graph.updates.items():
        torch.testing.assert_close(updates[label], dense[node.name], equal_nan=True)


@examples(40, 100)
@given(programs())
def test_collectives_that_are_started_ahead_give_the_same_bits(program: Program) -> None:
    partitioned = partition_graph(program.graph)
    returns, updates = run_reference(partitioned, program.values)
    apart = OverlapCollectives().run(partitioned, Context())
    verify(apart, run=True)
    assert str(parse_graph(str(apart))) == str(apart)
    again, updated = run_reference(apart, program.values)
    for got, expected in zip([*again, *updated.values()], [*returns, *updates.values()], strict=True):
        assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(expected))
    plan = emit_plan(apart, CompileOptions(target="cuda:90", collectives="nccl"))
    assert wrong_wait(plan) is None
    started = sum(ops.is_collective(node.target) for node in apart.calls)
    assert sum(instruction.op == "wait" for instruction in plan.instructions) == started


@examples(25, 50)
@given(programs())
def test_state_keeps_its_layout_and_inputs_are_as_given(program: Program) -> None:
    partitioned = partition_graph(program.graph)
    before = {p.meta["label"]: p.meta["type"] for p in program.graph.placeholders}
    for placeholder in partitioned.placeholders:
        assert placeholder.meta["type"] == before[placeholder.meta["label"]]
    for label, node in partitioned.updates.items():
        mesh = program.graph.mesh
        for name, size in mesh.dims:
            placement = node.meta["type"].layout.placement(name)
            assert size == 1 or placement == before[label].layout.placement(name)
            assert placement != VARYING
