"""What a plan's report says of every value, on training steps laid out in several ways."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch

import monarch
from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.cost.work import graph_costs
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan, ReportedValue
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import TARGETS
from monarch.compiler.plan.report import peak
from monarch.compiler.report import traced_graph
from monarch.compiler.states import StateKey
from monarch.compiler.text import parse_graph
from monarch.distributed import Mesh
from tests.compiler.inspect.programs import KINDS, megatron, training_plan


def values_of(plan: Plan) -> dict[str, ReportedValue]:
    assert plan.report is not None
    return {value.name: value for value in plan.report.values}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_has_every_value_in_the_order_of_the_schedule(kind: str) -> None:
    plan = training_plan(kind)
    assert plan.report is not None
    graph = parse_graph(plan.graph)
    names = [node.name for node in graph.fx.nodes if node.op != "output"]
    assert sorted(value.name for value in plan.report.values) == sorted(names)
    made = [value.instruction for value in plan.report.values if value.instruction >= 0]
    commits = [i for i, instruction in enumerate(plan.instructions) if instruction.op == "commit"]
    assert sorted(made + commits) == list(range(len(plan.instructions))) and made == sorted(made)
    for number, value in enumerate(plan.report.values):
        assert all(read < number for read in value.reads)
        assert f"%{value.name} = {value.call}" in plan.graph
        if value.instruction >= 0:
            assert value.source == plan.instructions[value.instruction].source


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_has_what_kernels_compute(kind: str) -> None:
    """Each op of a program stands in it, fused or not, with the same module, phase, line and operations."""
    plain, fused = training_plan(kind), training_plan(kind, "all")
    assert plain.report is not None and fused.report is not None
    values = fused.report.values
    names = {value.name: number for number, value in enumerate(values)}
    assert len(names) == len(values)
    made = [value.instruction for value in values if value.instruction >= 0]
    commits = [i for i, instruction in enumerate(fused.instructions) if instruction.op == "commit"]
    assert sorted({*made, *commits}) == list(range(len(fused.instructions))) and made == sorted(made)
    kernels = [number for number, value in enumerate(values) if value.op == "kernel"]
    assert kernels and {value.kernel for value in values} == {-1, *kernels}
    for number, value in enumerate(values):
        assert all(read < number for read in value.reads)
        if value.kernel >= 0:
            assert number < value.kernel or value.reads == (value.kernel,)
    gone = {"getitem", "aten.native_layer_norm", "aten.native_layer_norm_backward"}
    compared = 0
    for value in plain.report.values:
        if value.name in names and value.op not in gone and value.name not in {values[k].name for k in kernels}:
            other = values[names[value.name]]
            assert (other.op, other.module, other.types) == (value.op, value.module, value.types)
            assert (other.phase, other.traced) == (value.phase, value.traced), value.name
            assert fused.sources[other.source] == plain.sources[value.source]
            compared += value.instruction >= 0 and other.kernel >= 0
    assert compared > 100
    # The update is one call, which holds all gradients; op by op each is freed behind its parameter's update.
    assert peak(fused)[0] <= peak(plain)[0] * 1.1


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", ["off", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_the_program_has_a_decision_for_each_mesh_dim(kind: str, kernels: str) -> None:
    plan = training_plan(kind, kernels)
    assert plan.report is not None
    dims = parse_graph(plan.graph).partitioned
    for value in plan.report.values:
        if value.traced or value.instruction < 0:
            assert tuple(decision.mesh_dim for decision in value.decisions) == dims
        for decision in value.decisions:
            assert decision.exact and decision.why
            assert value not in [plan.report.values[cause] for cause in decision.causes]
            if decision.rule:
                first, *rest = decision.alternatives
                assert first.extra == 0
                assert [other.extra for other in rest] == sorted(other.extra for other in rest)
                assert all(other.extra >= 0 and math.isfinite(other.extra) for other in rest)
                assert " -> " in first.text or value.reads == ()


@pytest.mark.parametrize("kernels", ["off", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_in_sentences_are_names_of_values(kind: str, kernels: str) -> None:
    plan = training_plan(kind, kernels)
    values = values_of(plan)
    for value in values.values():
        for text in (value.why, *(decision.why for decision in value.decisions)):
            for name in re.findall(r"%(\w+)", text):
                assert name in values, (value.name, text)


@pytest.mark.parametrize("kernels", ["off", "all"])
def test_causes_lead_back_to_what_the_user_said(kernels: str) -> None:
    """From each value that is cut, causes lead to an input or a state that is cut over the same mesh dim."""
    plan = training_plan("nested", kernels)
    assert plan.report is not None
    values = plan.report.values
    for value in values:
        for decision in value.decisions:
            if not decision.factor:
                continue
            seen, waiting, roots = set(decision.causes), list(decision.causes), []
            while waiting:
                at = waiting.pop()
                found = next((d for d in values[at].decisions if d.mesh_dim == decision.mesh_dim), None)
                if found is not None and found.causes:
                    new = [cause for cause in found.causes if cause not in seen]
                    seen.update(new)
                    waiting += new
                else:
                    roots.append(values[at])
            assert any(
                decision.mesh_dim in str(each) for root in roots for each in root.types if root.instruction < 0
            ), (value.name, decision.mesh_dim)


@pytest.mark.parametrize("kernels", ["off", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_phases_and_modules(kind: str, kernels: str) -> None:
    plan = training_plan(kind, kernels)
    assert plan.report is not None
    values = plan.report.values
    phases = [value.phase for value in values if value.instruction >= 0 and value.traced]
    assert set(phases) == {"forward", "backward", "update"}
    by_module = Counter((value.module, value.phase) for value in values)
    for layer in (0, 1):
        for part in ("attention.q", "attention.o", "mlp.up", "mlp.down"):
            for phase in ("forward", "backward", "update"):
                assert by_module[f"blocks.{layer}.{part}", phase], (layer, part, phase)
    values_by_name = values_of(plan)
    for name, value in values_by_name.items():
        if value.op == "state":
            assert value.module == StateKey.of(value.call.split('"')[1]).module
        if value.op.startswith("aten.lerp") or value.op.startswith("aten.addcdiv"):
            assert value.phase == "update", name
        if value.op in ("all_reduce", "reduce_scatter"):
            assert value.phase != "update", name  # the sums of gradients are the backward pass's last steps


@pytest.mark.parametrize(
    ("label", "module"),
    [
        ("blocks.0.attn.q.weight", "blocks.0.attn.q"),
        ("adamw.exp_avg[blocks.0.attn.q.weight]", "blocks.0.attn.q"),
        ("grad[fc.weight]", "fc"),
        ("up", ""),
        ("adamw.step[up]", ""),
    ],
)
def test_the_module_of_a_state(label: str, module: str) -> None:
    assert StateKey.of(label).module == module


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_traced_text_gives_the_same_plan_and_report(kind: str) -> None:
    plan = training_plan(kind)
    again = compile_graph(traced_graph(plan), report=True)
    assert (again.hash, again.graph, again.traced) == (plan.hash, plan.graph, plan.traced)
    assert again.report == plan.report


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_survives_its_file(kind: str) -> None:
    plan = training_plan(kind)
    data = plan_bytes(plan)
    loaded = plan_from_bytes(data)
    assert loaded.report == plan.report and loaded.traced == plan.traced
    assert plan_bytes(loaded) == data
    assert len(data) < 1000 * len(plan.instructions) + sum(4 * t.numel() for t in plan.constants.values())


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_sent_are_those_of_the_costs(kind: str) -> None:
    plan = training_plan(kind)
    assert plan.report is not None
    found: dict[str, int] = {}
    for value in plan.report.values:
        if value.mesh_dims:
            key = f"{','.join(value.mesh_dims)} {value.op}"
            found[key] = found.get(key, 0) + value.sent
            assert value.why
    told = {
        f"{dims} {op}": numbers["bytes"]
        for dims, by_op in plan.costs["collectives"].items()
        for op, numbers in by_op.items()
    }
    assert (
        found
        == told
        == {
            f"{dims} {op}": numbers["bytes"]
            for dims, by_op in graph_costs(parse_graph(plan.graph))["collectives"].items()
            for op, numbers in by_op.items()
        }
    )
    assert plan.costs["peak_bytes"] == peak(plan)[0]


def test_operations_and_bytes_of_one_worker() -> None:
    plan = megatron()
    values = values_of(plan)
    matmul = values["mm"]
    assert matmul.types[0] is not None and matmul.types[0].shape == (8, 256)
    assert matmul.flops == 2 * 2 * 64 * 128
    assert matmul.moved == 4 * (2 * 64 + 64 * 128 + 2 * 128)
    assert matmul.allocates == 4 * 2 * 128
    assert matmul.seconds == MACHINES["cpu"].op_seconds("f32", matmul.flops, matmul.moved)
    reduce = next(value for value in values.values() if value.op == "all_reduce")
    assert reduce.sent == 4 * 2 * 64
    assert reduce.seconds == cluster_of("cpu").collective_seconds("all_reduce", reduce.sent, (2,))


def test_estimates_know_every_target() -> None:
    assert set(MACHINES) == set(TARGETS)
    for target, machine in MACHINES.items():
        assert machine.op_seconds("f32", 1e12, 0) > machine.op_seconds("f32", 1e9, 0)
        many, few = (cluster_of(target).collective_seconds(op, 2**20, (4,)) for op in ("all_reduce", "all_gather"))
        assert many > few


def test_a_program_over_a_mesh_dim_of_one_worker() -> None:
    graph: Graph = parse_graph(
        """graph @f on mesh<data=2, model=1> {
             %x = input 0 : f32[8@data, 4@model]
             %y = aten.relu(%x) : f32[8, 4]
             return %y
           }"""
    )
    values = values_of(compile_graph(graph, report=True))
    assert [decision.mesh_dim for decision in values["y"].decisions] == ["data", "model"]
    assert values["y"].decisions[1].why == "'model' has one worker, which holds the whole value"


def test_a_layout_line_is_what_the_user_said() -> None:
    values = values_of(megatron())
    said = [value for value in values.values() if any("layout() at" in d.why for d in value.decisions)]
    assert [value.op for value in said] == ["shard"]
    numbers = {name: number for number, name in enumerate(values)}
    assert values["mm"].decisions[0].causes == (numbers[said[0].name],)


def test_a_program_called_at_once_pays_for_no_report() -> None:
    mesh = Mesh.abstract(data=2)
    weight = monarch.distribute(torch.ones(4, 4), mesh, "[@data, -]")
    plan = monarch.program(lambda: weight * 2, mesh=mesh).compile()
    assert plan.report is not None
    bare = compile_graph(traced_graph(plan))
    assert bare.report is None and "report" not in bare.costs["seconds"] and "peak_bytes" not in bare.costs
