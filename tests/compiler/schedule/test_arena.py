"""The arena: regions of values that live at the same time do not overlap, and a plan computes the same bits with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.compiler.context import Context
from monarch.compiler.kernels.fuse import FuseKernels
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.pipeline import compile_graph, partition_graph
from monarch.compiler.plan import ArenaRange, Instruction, Plan, Slot
from monarch.compiler.plan.arena import overlapping, region_bytes
from monarch.compiler.plan.check import check_plan
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.schedule import arena as placing
from monarch.compiler.schedule.arena import Lifetime, lower_bound, pack
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph
from monarch.runtime.worker.arena import Arena
from monarch.runtime.worker.device.native import bind
from monarch.runtime.worker.frame import Frame
from tests.compiler.programs import Program, programs
from tests.sample import examples

SPANS = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(64 * size, first, first + length),
        st.integers(1, 20),
        st.integers(0, 12),
        st.integers(0, 12),
    ),
    max_size=24,
)


@settings(max_examples=300)
@given(SPANS)
def test_what_is_needed_at_once_does_not_overlap(spans: list[Lifetime]) -> None:
    total, offsets = pack(spans)
    assert lower_bound(spans) <= total <= sum(span.size for span in spans)
    for a, (one, start) in enumerate(zip(spans, offsets, strict=True)):
        assert 0 <= start <= total - one.size and start % 64 == 0
        for other, begin in zip(spans[:a], offsets[:a], strict=True):
            at_once = one.first <= other.last and other.first <= one.last
            assert not at_once or start + one.size <= begin or begin + other.size <= start


def test_a_gap_is_filled_by_what_fits_best() -> None:
    # Two long-lived values with what lies between them gone: 192 bytes are free below, and 64 between.
    spans = [Lifetime(640, 0, 0), Lifetime(576, 0, 9), Lifetime(512, 0, 9), Lifetime(64, 1, 9), Lifetime(128, 1, 9)]
    total, offsets = pack(spans)
    assert total == lower_bound(spans) == 640 + 576 + 512
    assert offsets == [0, 640, 1216, 128, 0]


MLP = """graph @mlp on mesh<a=1> {
  %x = input 0 : f32[64, 64]
  %w = state "w" : f32[64, 64]
  %a = aten.mm(%x, %w) : f32[64, 64]
  %b = aten.gelu(%a) : f32[64, 64]
  %c = aten.mm(%b, %w) : f32[64, 64]
  %v = aten.view(%c, [4096]) : f32[4096]
  %d = aten.mm(%b, %a) : f32[64, 64]
  %e = aten.add.Tensor(%d, %c) : f32[64, 64]
  return %e, %v
}"""


def regions(plan: Plan) -> dict[str, ArenaRange | None]:
    """By op, and its number among those of its kind."""
    found: dict[str, ArenaRange | None] = {}
    for instruction in plan.instructions:
        count = sum(name.startswith(instruction.op) for name in found)
        found[f"{instruction.op} {count}"] = instruction.regions[0] if instruction.regions else None
    return found


def test_results_and_what_shares_their_memory_stay_out() -> None:
    plan = compile_graph(parse_graph(MLP), CompileOptions(kernels="off"), report=True)
    found = regions(plan)
    size = 64 * 64 * 4
    assert found["aten.mm.default 0"] == ArenaRange(0, torch.float32, (64, 64))
    # gelu is read with the first product at the end: both are there at once. The second product is a result, by a view.
    assert found["aten.gelu.default 0"] == ArenaRange(size, torch.float32, (64, 64))
    assert found["aten.mm.default 1"] is None
    # The sum is written over the last product, and is a result.
    assert found["aten.mm.default 2"] is None
    assert plan.arena == 2 * size
    assert plan.costs["arena"] == {"bytes": 2 * size, "least": 2 * size, "values": 2}
    assert plan_from_bytes(plan_bytes(plan)) == plan


def test_a_plan_for_a_gpu_has_none() -> None:
    plan = emit_plan(partition_graph(parse_graph(MLP)), CompileOptions(target="cuda:90"))
    assert plan.arena == 0 and not any(instruction.regions for instruction in plan.instructions)


def test_values_that_overlap_are_found() -> None:
    plan = compile_graph(parse_graph(MLP), CompileOptions(kernels="off"))
    assert overlapping(plan) is None
    at = {instruction.op: number for number, instruction in enumerate(plan.instructions)}
    gelu = at["aten.gelu.default"]
    first = plan.instructions[0].regions
    broken = list(plan.instructions)
    broken[gelu] = replace(broken[gelu], regions=first)
    assert overlapping(replace(plan, instructions=tuple(broken))) == (0, gelu)
    failures: list[str] = []

    def fail(message: str) -> Any:
        failures.append(message)
        raise ValueError

    with pytest.raises(ValueError):
        check_plan(replace(plan, instructions=tuple(broken)), fail)
    assert failures == [f"what instruction 0 writes into the arena is lost by {gelu}, and still to be read"]


def test_a_result_in_the_arena_is_found() -> None:
    plan = compile_graph(parse_graph(MLP), CompileOptions(kernels="off"))
    last = len(plan.instructions) - 1
    products = [number for number, each in enumerate(plan.instructions) if each.op == "aten.mm.default"]
    broken = list(plan.instructions)
    broken[products[1]] = replace(broken[products[1]], regions=(ArenaRange(2 * 64 * 64 * 4, torch.float32, (64, 64)),))
    assert overlapping(replace(plan, instructions=tuple(broken), arena=3 * 64 * 64 * 4)) == (products[1], last + 1)


@pytest.mark.parametrize("arguments", ["(%a)", "([%w, %a])", "(%w, other=%a)"])
def test_what_an_op_of_a_users_own_might_hand_back_is_found(arguments: str) -> None:
    """It stays out of the arena; were it in there, the check would say so, however the op is given it."""
    plan = compile_graph(parse_graph(MLP), CompileOptions(kernels="off"))
    (first,) = plan.instructions[0].regions
    assert first is not None
    a, w = Slot(plan.instructions[0].out), Slot(plan.inputs[1].slot)
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "(%a)": ((a,), {}),
        "([%w, %a])": (([w, a],), {}),
        "(%w, other=%a)": ((w,), {"other": a}),
    }
    args, kwargs = given[arguments]
    own = Instruction("mine.same.default", args, kwargs, plan.slots, free=(a.index,))
    over = replace(plan.instructions[0], out=plan.slots + 1)
    read = Instruction("aten.neg.default", (Slot(plan.slots),), {}, plan.slots + 2)
    steps = (plan.instructions[0], own, over, read)
    assert overlapping(replace(plan, instructions=steps, outputs=(), slots=plan.slots + 3)) == (0, 2)


# -- the same bits -----------------------------------------------------------------------------------------------------


def alone(op: str, *arguments: Any) -> Callable[..., Any]:
    """What the one worker of a mesh runs."""
    if op == "kernel":
        return bind(None, *arguments, 1)
    if op in LOCAL_OPS:
        return lambda *args, **kwargs: LOCAL_OPS[op]({"a": 0}, {"a": 1}, *args, **kwargs)
    if op == "commit":
        return lambda: None
    return lambda tensors: [tensor.clone() for tensor in tensors]


def run(plan: Plan, program: Program, arena: Arena) -> tuple[torch.Tensor, ...]:
    frame = Frame(plan, alone, arena)
    arguments = [program.values[spec.label].clone() for spec in plan.inputs]
    with torch.inference_mode():
        return frame.run(arguments)


def bare(instruction: Instruction) -> Instruction:
    return replace(instruction, regions=())


@pytest.mark.parametrize("kernels", [False, True], ids=["by torch's ops", "in kernels"])
@examples(50, 150)
@given(program=programs(max_ops=14, max_workers=1))
def test_random_plans_compute_the_same_bits_in_the_arena(kernels: bool, program: Program) -> None:
    """Also when they are run again, by when what the first run gave must not have changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "LEAST_BYTES", 1)
        graph = partition_graph(program.graph)
        if kernels:
            graph = FuseKernels().run(graph, Context(CompileOptions(kernels="all")))
        plan = emit_plan(graph, CompileOptions())
    assert overlapping(plan) is None
    expected = run(replace(plan, arena=0, instructions=tuple(map(bare, plan.instructions))), program, Arena())
    arena = Arena(plan.arena)
    if plan.arena:
        arena.at(ArenaRange(0, torch.uint8, (plan.arena,))).fill_(0xFF)  # nan, where it is read as numbers
    first = run(plan, program, arena)
    second = run(plan, program, arena)
    if plan.arena:
        arena.at(ArenaRange(0, torch.uint8, (plan.arena,))).fill_(0xFF)
    for results in (first, second):
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right) and result.dtype == right.dtype


def test_much_of_what_random_plans_make_lies_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test before says something."""
    monkeypatch.setattr(placing, "LEAST_BYTES", 1)
    plan = compile_graph(parse_graph(MLP), CompileOptions(kernels="all"))
    assert sum(region_bytes(each) for step in plan.instructions for each in step.regions if each) >= 2 * 64 * 64 * 4
