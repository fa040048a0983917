"""What a report says that workers hold, against what real workers hold."""

from __future__ import annotations

import pytest
import torch

import monarch
from monarch.compiler.errors import MonarchError
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan, Step
from monarch.compiler.plan.report import held, peak
from monarch.compiler.schedule.footprint import gives_list
from monarch.compiler.text import parse_graph
from monarch.distributed import Mesh
from tests.compiler.inspect.programs import training_plan, training_step


def before_frees(plan: Plan) -> dict[int, int]:
    """What the report says that a worker holds as each instruction is done, before it frees anything."""
    assert plan.report is not None
    found, total = {}, 0
    for value in plan.report.values:
        total += value.allocates
        if value.instruction >= 0:
            found[value.instruction] = total
        total -= value.frees
    return found


def measured(steps: tuple[Step, ...], worker: int) -> dict[int, int]:
    (step,) = [step for step in steps if step.worker == worker]
    return {span.instruction: span.held for span in step.spans}


@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        pytest.param("data", {"data": 2}, marks=pytest.mark.full),
        pytest.param("fully sharded", {"data": 2}, marks=pytest.mark.full),
        pytest.param("tensor", {"data": 1, "model": 2}, marks=pytest.mark.full),
        ("nested", {"data": 2, "model": 2}),
    ],
)
def test_a_training_step_holds_what_its_report_says(kind: str, dims: dict[str, int]) -> None:
    """All through the step, and nothing beside it: the gradients that the last step left are gone when it begins."""
    with Mesh(**dims) as mesh:
        step, arguments = training_step(mesh, kind)
        for _ in range(3):
            step(*arguments).item()
        plan = step.compile(*arguments)
        with monarch.profile() as profile:
            step(*arguments).item()
        real = measured(profile.traces[0].steps, mesh.size() - 1)
    told = before_frees(plan)
    assert set(told) <= set(real)
    assert {real[instruction] - told[instruction] for instruction in told} == {0}


def test_a_forward_pass_holds_exactly_what_its_report_says() -> None:
    with Mesh(data=2) as mesh:
        weight = monarch.distribute(torch.randn(64, 64), mesh, "[@data, -]")

        @monarch.program
        def forward(x: "f32[8@data, 64]") -> torch.Tensor:
            hidden = (x @ weight).view(8, 4, 16).transpose(1, 2)
            return hidden.reshape(8, 64).softmax(1)[:, :8].expand(8, 8) * 2

        x = torch.randn(8, 64)
        for _ in range(2):
            forward(x).full_tensor()
        plan = forward.compile(x)
        with monarch.profile() as profile:
            forward(x).full_tensor()
        assert measured(profile.traces[0].steps, 1) == before_frees(plan)


def test_held_and_peak() -> None:
    plan = training_plan("nested")
    assert plan.report is not None
    after = held(plan)
    assert len(after) == len(plan.report.values) and min(after) >= 0
    most, at = peak(plan)
    value = plan.report.values[at]
    assert most == after[at] + value.frees and most >= max(after)
    inputs = [number for number, value in enumerate(plan.report.values) if value.instruction < 0]
    assert after[inputs[-1]] == sum(plan.report.values[number].allocates for number in inputs)


def test_views_and_writes_in_place_take_nothing() -> None:
    graph = parse_graph(
        """graph @f on mesh<data=2> partitioned<data> {
             %w = state "w" : f32[8, 4]
             %g = input 0 : f32[8, 4]
             %v = aten.view(%g, [32]) : f32[32]
             %t = aten.permute(%g, [1, 0]) : f32[4, 8]
             %r = aten.view(%t, [32]) : f32[32]
             %s = aten.add.Tensor(%v, %r) : f32[32]
             %u = aten.view(%s, [8, 4]) : f32[8, 4]
             %a = aten.mul.Tensor(%w, 0.5) : f32[8, 4]
             %n = aten.sub.Tensor(%a, %u) : f32[8, 4]
             update "w" = %n
             return
           }"""
    )
    plan = compile_graph(graph, report=True)
    assert plan.report is not None
    told = {value.name: (value.allocates, value.frees) for value in plan.report.values}
    assert told == {
        "w": (128, 0),
        "g": (128, 0),
        "v": (0, 0),
        "t": (0, 0),
        "r": (128, 0),  # a permuted tensor has to be copied to be flat
        "s": (128, 128),
        "u": (0, 0),
        "a": (0, 0),
        "n": (0, 128),
    }


def test_a_plan_without_a_report() -> None:
    plan = compile_graph(parse_graph("graph @f on mesh<> {\n %x = input 0 : f32[2]\n return %x\n}"))
    for ask in (held, peak):
        with pytest.raises(MonarchError, match="plan 'f' has no report"):
            ask(plan)


def test_a_local_op_that_cannot_run_without_data_gives_one_tensor() -> None:
    assert {op for op in LOCAL_OPS if gives_list(op)} <= {"kernel", "out_of_place"}
