"""What the plan says of buffers: what is freed and when, what is written in place, where the step commits."""

from __future__ import annotations

import torch

from monarch.compiler.plan import Plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph


def plan_of(body: str) -> Plan:
    return emit_plan(parse_graph("graph @f on mesh<data=2> partitioned<data> {\n" + body + "\n}"), CompileOptions())


def ops(plan: Plan) -> list[str]:
    return [instruction.op for instruction in plan.instructions]


def test_state_is_updated_in_place_after_the_commit() -> None:
    plan = plan_of(
        """%w = state "w" : f32[8]
           %g = input 0 : f32[8]
           %d = aten.mul.Tensor(%g, 0.1) : f32[8]
           %a = aten.mul.Tensor(%w, 0.9) : f32[8]
           %n = aten.sub.Tensor(%a, %d) : f32[8]
           update "w" = %n
           return"""
    )
    assert ops(plan) == ["aten.mul.Tensor", "commit", "aten.mul_.Tensor", "aten.sub_.Tensor"]
    assert plan.donated == (True, False)


def test_an_update_that_something_reads_that_can_fail_has_memory_of_its_own() -> None:
    """The lookup comes before the commit, and no state is written before that."""
    plan = plan_of(
        """%w = state "w" : f32[8]
           %i = input 0 : i64[1]
           %n = aten.mul.Tensor(%w, 0.9) : f32[8]
           %y = aten.index_select(%n, 0, %i) : f32[1]
           update "w" = %n
           return %y"""
    )
    assert ops(plan) == ["aten.mul.Tensor", "aten.index_select.default"]
    assert plan.donated == (True, False)


def test_an_argument_is_never_written() -> None:
    plan = plan_of(
        """%x = input 0 : f32[8]
           %a = aten.mul.Tensor(%x, 0.9) : f32[8]
           %b = aten.neg(%a) : f32[8]
           return %b"""
    )
    assert ops(plan) == ["aten.mul.Tensor", "aten.neg_.default"]
    assert plan.donated == (False,)


def test_an_argument_that_is_checked_is_never_written() -> None:
    """A check gives its operand as it is."""
    plan = plan_of(
        """%i = input 0 : i64[8]
           %r = in_range(%i, 7, none) : i64[8]
           %a = aten.add.Tensor(%r, 1) : i64[8]
           return %a"""
    )
    assert ops(plan) == ["in_range", "aten.add.Tensor"]


def test_a_value_that_is_read_later_or_through_a_view_is_not_overwritten() -> None:
    plan = plan_of(
        """%x = input 0 : f32[2, 4]
           %a = aten.exp(%x) : f32[2, 4]
           %v = aten.view(%a, [8]) : f32[8]
           %b = aten.neg(%a) : f32[2, 4]
           %c = aten.abs(%v) : f32[8]
           return %b, %c"""
    )
    assert ops(plan) == ["aten.exp.default", "aten.reshape.default", "aten.neg.default", "aten.abs_.default"]


def test_expanded_values_are_not_written_and_not_returned_as_they_are() -> None:
    plan = plan_of(
        """%x = input 0 : f32[1]
           %a = aten.exp(%x) : f32[1]
           %e = aten.expand(%a, [8]) : f32[8]
           %b = aten.neg(%e) : f32[8]
           update "new" = %e
           return %b"""
    )
    assert ops(plan) == ["aten.exp.default", "aten.expand.default", "aten.neg.default", "aten.clone.default"]


def test_a_returned_view_of_state_is_a_copy() -> None:
    plan = plan_of(
        """%w = state "w" : f32[2, 4]
           %v = aten.view(%w, [8]) : f32[8]
           %n = aten.mul.Tensor(%w, 2.0) : f32[2, 4]
           update "w" = %n
           return %v"""
    )
    assert ops(plan) == ["aten.reshape.default", "aten.mul.Tensor", "aten.clone.default"]


def test_states_that_swap_places_are_copied() -> None:
    plan = plan_of(
        """%a = state "a" : f32[2]
           %b = state "b" : f32[2]
           update "a" = %b
           update "b" = %a
           return"""
    )
    assert ops(plan) == ["aten.clone.default", "aten.clone.default"]


def test_every_value_is_freed_after_its_last_use_and_results_never() -> None:
    plan = plan_of(
        """%x = input 0 : f32[8]
           %a = aten.exp(%x) : f32[8]
           %b = aten.add.Tensor(%a, %x) : f32[8]
           %c = aten.sum(%b) : f32[]
           return %c"""
    )
    slots = {spec.slot for spec in plan.inputs} | {i.out for i in plan.instructions}
    freed = [slot for instruction in plan.instructions for slot in instruction.free]
    assert sorted(freed) == sorted(slots - {plan.outputs[0].slot})
    assert plan.instructions[0].free == ()


def test_a_plan_is_the_same_for_the_same_graph_and_another_for_another() -> None:
    body = """%x = input 0 : f32[8]
              %a = aten.mul.Tensor(%x, {}) : f32[8]
              return %a"""
    assert plan_of(body.format("2.0")).hash == plan_of(body.format("2.0")).hash
    assert plan_of(body.format("2.0")).hash != plan_of(body.format("3.0")).hash
    assert plan_of(body.format("2.0")).inputs[0].type.dtype == torch.float32


def test_a_part_of_a_larger_buffer_is_not_written_over() -> None:
    """What is written over it would keep all of the buffer."""
    plan = plan_of(
        """%x = input 0 : f32[8]
           %a = aten.exp(%x) : f32[8]
           %b = shard(%a, "data", 0) : f32[4] of f32[8@data]
           %c = aten.neg(%b) : f32[4] of f32[8@data]
           %d = aten.abs(%c) : f32[4] of f32[8@data]
           return %d"""
    )
    assert ops(plan) == ["aten.exp.default", "shard", "aten.neg.default", "aten.abs_.default"]


def test_a_part_of_a_larger_buffer_is_copied_to_be_a_result() -> None:
    plan = plan_of(
        """%x = input 0 : f32[8]
           %a = aten.exp(%x) : f32[8]
           %b = shard(%a, "data", 0) : f32[4] of f32[8@data]
           %c = aten.view(%a, [2, 4]) : f32[2, 4]
           update "b" = %b
           return %c"""
    )
    assert ops(plan) == ["aten.exp.default", "shard", "aten.reshape.default", "aten.clone.default"]


def test_padding_is_zeroed_in_place_through_views() -> None:
    """Also where the value is read again: its padding may hold anything."""
    plan = plan_of(
        """%x = input 0 : f32[6@data, 4]
           %a = aten.exp(%x) : f32[6@data, 4]
           %t = aten.permute(%a, [1, 0]) : f32[4, 6@data]
           %f = fill_padding(%t, 1, 5, 0.0, ["data"]) : f32[4, 6@data]
           %g = aten.mm(%f, %x) : f32[4, 4] partial<sum: data>
           %b = aten.neg(%a) : f32[6@data, 4]
           return %g, %b"""
    )
    assert ops(plan) == [
        "aten.exp.default",
        "aten.permute.default",
        "fill_padding_",
        "aten.mm.default",
        "aten.neg_.default",
    ]


def test_what_padding_may_not_be_zeroed_in_place_of() -> None:
    """Of arguments, of elements at several places, of parts of larger values, with other numbers, of integers."""
    for make, fill, kind in [
        ("aten.view(%x, [6, 4])", 0.0, "f32"),
        ("aten.expand(%r, [6, 4])", 0.0, "f32"),
        ("aten.slice.Tensor(%e, 0, 0, 6)", 0.0, "f32"),
        ("aten.neg(%x)", 1.0, "f32"),
        ("aten._to_copy(%x, dtype=i64)", 0, "i64"),
    ]:
        plan = plan_of(
            f"""%x = input 0 : f32[6, 4]
                %w = input 1 : f32[8, 4]
                %e = aten.exp(%w) : f32[8, 4]
                %r = aten.amax(%x, [1], true) : f32[6, 1]
                %a = {make} : {kind}[6, 4]
                %f = fill_padding(%a, 0, 5, {fill}, []) : {kind}[6, 4]
                return %f"""
        )
        assert "fill_padding" in ops(plan) and "fill_padding_" not in ops(plan)
