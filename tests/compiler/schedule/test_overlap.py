"""Collectives that are started ahead: where they stand, what holds until they are waited for, and what a plan of them
says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from monarch.compiler.context import Pass
from monarch.compiler.errors import GraphError, MonarchError
from monarch.compiler.inspect.timeline import collective_dims
from monarch.compiler.inspect.why import explain
from monarch.compiler.pipeline import compile_graph, graph_after, run_passes
from monarch.compiler.plan import Plan, Slot
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.report import peak
from monarch.compiler.plan.waits import wrong_wait
from monarch.compiler.schedule.overlap import OverlapCollectives
from monarch.compiler.text import parse_graph
from monarch.compiler.verify import verify

Expect = Callable[[str, Pass], None]

GRADIENTS = """graph @f on mesh<data=2> partitioned<data> {
  %w = state "w"                         : f32[8, 8]
  %x = input 0                           : f32[8, 16@data]
  %d = input 1                           : f32[16@data, 8]
  %e = input 2                           : f32[8, 8]
  %g = aten.mm(%x, %d)                   : f32[8, 8] partial<sum: data>
  %h = aten.mm(%d, %e)                   : f32[16@data, 8]
  %i = aten.mm(%x, %h)                   : f32[8, 8] partial<sum: data>
  %r = all_reduce([%g], ["data"], "sum") : (f32[8, 8])
  %s = getitem(%r, 0)                    : f32[8, 8]
  %v = aten.view(%s, [8, 8])             : f32[8, 8]
  %q = all_reduce([%i], ["data"], "sum") : (f32[8, 8])
  %t = getitem(%q, 0)                    : f32[8, 8]
  %m = aten.mm(%e, %e)                   : f32[8, 8]
  %n = aten.sub.Tensor(%w, %v)           : f32[8, 8]
  %o = aten.sub.Tensor(%n, %t)           : f32[8, 8]
  update "w" = %o
  return %m
}"""


def test_a_sum_is_started_where_its_summand_is_and_waited_for_where_it_is_read(expect: Expect) -> None:
    expect(GRADIENTS, OverlapCollectives())


def test_no_more_than_two_layers_are_whole_at_a_time(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %a = state "0.w"                       : f32[8@data, 8]
          %b = state "1.w"                       : f32[8@data, 8]
          %c = state "2.w"                       : f32[8@data, 8]
          %x = input 0                           : f32[4, 8]
          %p = all_gather([%a], ["data"], [0])   : (f32[8, 8])
          %q = getitem(%p, 0)                    : f32[8, 8]
          %y = aten.mm(%x, %q)                   : f32[4, 8]
          %r = all_gather([%b], ["data"], [0])   : (f32[8, 8])
          %s = getitem(%r, 0)                    : f32[8, 8]
          %z = aten.mm(%y, %s)                   : f32[4, 8]
          %t = all_gather([%c], ["data"], [0])   : (f32[8, 8])
          %u = getitem(%t, 0)                    : f32[8, 8]
          %o = aten.mm(%z, %u)                   : f32[4, 8]
          return %o
        }""",
        OverlapCollectives(),
    )


def test_what_moves_a_collectives_result_stays(expect: Expect) -> None:
    expect(
        """graph @f on mesh<a=2, b=2> partitioned<a, b> {
          %x = input 0                           : f32[8, 8] partial<sum: a,b>
          %y = input 1                           : f32[8, 8]
          %p = all_reduce([%x], ["a"], "sum")    : (f32[8, 8] partial<sum: b>)
          %q = getitem(%p, 0)                    : f32[8, 8] partial<sum: b>
          %m = aten.mm(%y, %y)                   : f32[8, 8]
          %r = all_reduce([%q], ["b"], "sum")    : (f32[8, 8])
          %s = getitem(%r, 0)                    : f32[8, 8]
          return %s, %m
        }""",
        OverlapCollectives(),
    )


def test_under_a_limit_waits_stand_behind_their_collectives_where_memory_is_short(expect: Expect) -> None:
    expect(GRADIENTS, OverlapCollectives(), CompileOptions(target="cuda:90", memory_limit=1))


TRACED = """graph @f on mesh<data=2> {
  %w = state "w"                  : f32[64, 64]
  %x = input 0                    : f32[64, 128@data]
  %d = input 1                    : f32[128@data, 64]
  %g = aten.mm(%x, %d)            : f32[64, 64]
  %m = aten.mm(%w, %w)            : f32[64, 64]
  %n = aten.sub.Tensor(%w, %g)    : f32[64, 64]
  update "w" = %n
  return %m
}"""


ON_GPUS = CompileOptions(target="cuda:90", collectives="nccl", kernels="off")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_graph(parse_graph(TRACED), ON_GPUS, report=True)


def at(plan: Plan, op: str) -> int:
    return next(number for number, each in enumerate(plan.instructions) if each.op == op)


def test_what_is_on_its_way_is_kept_until_the_wait(plan: Plan) -> None:
    start, wait = plan.instructions[at(plan, "all_reduce")], plan.instructions[at(plan, "wait")]
    assert at(plan, "all_reduce") < at(plan, "aten.mm.default") + 2 < at(plan, "wait")
    assert wait.args[0] == Slot(start.out) and wait.args[1] == start.args[0]
    moved = start.args[0][0].index
    assert {moved, start.out} <= set(wait.free)
    before = plan.instructions[: at(plan, "wait")]
    assert not any(moved in each.free for each in before)
    assert not any(each.op.split(".")[1].endswith("_") for each in before if "." in each.op)


def test_only_plans_for_nccl_wait() -> None:
    for target, collectives in (("cpu", "monarch"), ("cpu", "gloo"), ("cuda:90", "monarch")):
        made = compile_graph(parse_graph(TRACED), CompileOptions(target=target, collectives=collectives, kernels="off"))
        assert all(each.op != "wait" for each in made.instructions)


def test_a_plan_of_waits_is_read_and_looked_at(plan: Plan) -> None:
    assert plan_from_bytes(plan_bytes(plan)).instructions == plan.instructions
    assert collective_dims(plan, at(plan, "wait")) == ("data",)
    sum_of_g = next(value for value in plan.report.values if value.op == "all_reduce")  # type: ignore[union-attr]
    (moved,) = explain(plan, sum_of_g.name).moved
    assert plan.report.values[moved.value].name == "g"  # type: ignore[union-attr]
    assert [plan.report.values[taker].name for taker in moved.takers] == ["n"]  # type: ignore[union-attr]
    summed = next(value for value in plan.report.values if value.op == "wait")  # type: ignore[union-attr]
    assert (summed.sent, summed.seconds, summed.allocates) == (0, 0.0, 0)
    assert "= wait(" in plan.graph
    assert "= wait(" in str(graph_after(parse_graph(TRACED), "overlap-collectives", CompileOptions(collectives="nccl")))


def test_memory_counts_what_is_on_its_way() -> None:
    together = compile_graph(parse_graph(TRACED), ON_GPUS, report=True)
    square = 4 * 64 * 64
    inputs = square + 2 * 4 * 64 * 64
    # The summand, the sum on its way, and what is computed meanwhile.
    assert peak(together)[0] == inputs + 3 * square
    limit = inputs + 3 * square
    made = compile_graph(
        parse_graph(TRACED),
        replace(ON_GPUS, memory_limit=limit),
        report=True,
    )
    assert made.costs["peak_bytes"] == peak(made)[0] <= limit


def edited(plan: Plan, number: int, **changes: Any) -> Plan:
    instructions = list(plan.instructions)
    instructions[number] = replace(instructions[number], **changes)
    return replace(plan, instructions=tuple(instructions))


def test_waits_that_are_wrong(plan: Plan) -> None:
    assert wrong_wait(plan) is None
    wait, start = at(plan, "wait"), at(plan, "all_reduce")
    (moved,) = plan.instructions[start].args[0]
    reads = edited(plan, at(plan, "getitem"), args=(Slot(plan.instructions[start].out), 0))
    early = replace(reads, instructions=reads.instructions[:wait] + reads.instructions[wait + 1 :])
    cases = [
        (edited(plan, wait, args=(moved, [moved])), "it waits for what is no collective's result"),
        (edited(plan, wait, args=(Slot(plan.instructions[start].out), [])), "it has to take the tensors"),
        (edited(plan, wait, args=(1, 2)), "it waits for what is no collective's result"),
        (early, "nobody has waited for what a collective makes there"),
    ]
    for wrong, message in cases:
        found = wrong_wait(wrong)
        assert found is not None and message in found[1]
        with pytest.raises(MonarchError, match=message):
            plan_from_bytes(plan_bytes(wrong))
    monarchs = wrong_wait(replace(early, options=CompileOptions()))
    assert monarchs is None  # there a collective's result is there at once
    output = replace(plan.outputs[0], slot=plan.instructions[start].out)
    last = edited(plan, wait, op="aten.neg.default", args=(moved,), free=())
    left = wrong_wait(replace(last, instructions=last.instructions[: wait + 1], outputs=(output,)))
    assert left == (wait + 1, f"nobody waits for output {output.label!a}")


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        (
            "%wait = wait(%r, [%g])",
            "%z = wait(%r, [%g]) : (f32[8, 8])\n%wait = wait(%z, [%g])",
            "has to wait for a col",
        ),
        ("%wait = wait(%r, [%g])", "%wait = wait(%r, [%i])", "has to take the tensors that %r moves"),
        ("%s = getitem(%wait, 0)", "%s = getitem(%r, 0)", "reads %r, for which %wait waits"),
    ],
)
def test_the_verifier_knows_waits(line: str, instead: str, message: str) -> None:
    text = str(run_passes(parse_graph(GRADIENTS), ["overlap-collectives"]))
    assert line in text
    with pytest.raises(GraphError, match=message):
        verify(parse_graph(text.replace(line, instead)))


def test_twice_is_once() -> None:
    once = run_passes(parse_graph(GRADIENTS), ["overlap-collectives"])
    assert str(run_passes(once, ["overlap-collectives"])) == str(once)
