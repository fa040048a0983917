"""Each pass on the smallest graph that shows its rewrite."""

from __future__ import annotations

import math
from collections.abc import Callable

from monarch.compiler.context import Context, Pass
from monarch.compiler.partition import PartitionByMesh
from monarch.compiler.passes import decompose
from monarch.compiler.passes.anomalies import DetectAnomalies
from monarch.compiler.passes.collectives import JoinCollectives, SimplifyReductions
from monarch.compiler.passes.decompose import DecomposeSplit, KeepUnevenApart
from monarch.compiler.passes.lookups import SimplifyLookups
from monarch.compiler.passes.simplify import SimplifyViews
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.schedule.commit import CommitLast
from monarch.compiler.text import parse_graph

Expect = Callable[[str, Pass], None]


def test_every_value_is_looked_at(expect: Expect) -> None:
    """But a view, and what holds anything."""
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %w = state "w"                         : f32[8]
          %x = input 0                           : f32[4@data, 8]
          %i = input 1                           : i64[4@data]
          %y = aten.log(%x)                      : f32[2, 8] of f32[4@data, 8]
          %t = aten.permute(%y, [1, 0])          : f32[8, 2] of f32[8, 4@data]
          %e = aten.empty_like(%y)               : f32[2, 8] of f32[4@data, 8]
          %z = aten.add.Tensor(%t, 1)            : f32[8, 2] of f32[8, 4@data]
          return %z, %e, %i
        }""",
        DetectAnomalies(),
    )


def test_views_that_undo_one_another_go(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> {
          %w = state "w"                         : f32[4, 8]
          %x = input 0                           : f32[2, 8]
          %t = aten.permute(%w, [1, 0])          : f32[8, 4]
          %u = aten.permute(%t, [1, 0])          : f32[4, 8]
          %m = aten.permute(%w, [1, 0])          : f32[8, 4]
          %y = aten.mm(%x, %t)                   : f32[2, 4]
          %z = aten.mm(%y, %u)                   : f32[2, 8]
          %a = aten.view(%z, [16])               : f32[16]
          %b = aten.view(%a, [2, 8])             : f32[2, 8]
          %v = aten.mm(%b, %m)                   : f32[2, 4]
          return %v
        }""",
        SimplifyViews(),
    )


def test_a_loss_over_batch_and_an_uneven_sequence_stays_apart(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> {
          %x = input 0                           : f32[4, 5@data, 8]
          %w = state "w"                         : f32[8, 6]
          %t = input 1                           : i64[4, 5@data]
          %r = aten.view(%x, [20, 8])            : f32[20, 8]
          %y = aten.mm(%r, %w)                   : f32[20, 6]
          %l = aten._log_softmax(%y, 1, false)   : f32[20, 6]
          %u = aten.view(%t, [20, 1])            : i64[20, 1]
          %g = aten.gather(%l, 1, %u)            : f32[20, 1]
          %s = aten.sum(%g)                      : f32[]
          return %s
        }""",
        KeepUnevenApart(),
    )


def test_a_softmax_over_a_sharded_dim_is_taken_apart(expect: Expect) -> None:
    expect(
        """graph @f on mesh<model=2> {
          %x = input 0                           : f32[4, 8@model]
          %y = aten._softmax(%x, 1, false)       : f32[4, 8]
          return %y
        }""",
        DecomposeSplit(),
    )


def test_a_softmax_over_a_whole_dim_stays(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> {
          %x = input 0                           : f32[4@data, 8]
          %y = aten._softmax(%x, 1, false)       : f32[4, 8]
          return %y
        }""",
        DecomposeSplit(),
    )


def test_batches_and_heads_stay_apart_where_heads_are_sharded(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2, model=2> {
          %x = input 0                                   : f32[2@data, 4@model, 16, 4]
          %y = input 1                                   : f32[2@data, 4@model, 16, 4]
          %m = input 2                                   : f32[16, 16]
          %q = aten.view(%x, [8, 16, 4])                 : f32[8, 16, 4]
          %t = aten.permute(%y, [0, 1, 3, 2])            : f32[2, 4, 4, 16]
          %k = aten.view(%t, [8, 4, 16])                 : f32[8, 4, 16]
          %s = aten.bmm(%q, %k)                          : f32[8, 16, 16]
          %a = aten.add.Tensor(%s, %m)                   : f32[8, 16, 16]
          %p = aten._softmax(%a, -1, false)              : f32[8, 16, 16]
          %z = aten.bmm(%p, %q)                          : f32[8, 16, 4]
          %r = aten.view(%z, [2, 4, 16, 4])              : f32[2, 4, 16, 4]
          return %r
        }""",
        DecomposeSplit(),
    )


def test_composites_share_what_they_consist_of_where_all_but_the_operands_is_equal() -> None:
    text = """graph @f on mesh<model=2> {{
          %x = input 0                           : f32[4, 8@model]
          %w = state "w"                         : f32[8]
          %n = aten.native_layer_norm(%x, [8], %w, %w, {first}) : (f32[4, 8], f32[4, 1], f32[4, 1])
          %a = getitem(%n, 0)                    : f32[4, 8]
          %m = aten.native_layer_norm(%x, [8], %w, %w, {second}) : (f32[4, 8], f32[4, 1], f32[4, 1])
          %b = getitem(%m, 0)                    : f32[4, 8]
          return %a, %b
        }}"""

    def numbers(first: str, second: str) -> list[float]:
        graph = DecomposeSplit().run(parse_graph(text.format(first=first, second=second)), Context(CompileOptions()))
        return [number for node in graph.calls for number in node.args if isinstance(number, float)]

    before = len(decompose.TRACED)
    assert numbers("0.375", "0.375") == [0.375, 0.375] and len(decompose.TRACED) == before + 1
    assert numbers("0.0", "-0.0") == [0.0, 0.0]
    assert [math.copysign(1, number) for number in numbers("0.0", "-0.0")] == [1.0, -1.0]


def test_a_sum_of_one_term_is_that_term(expect: Expect) -> None:
    expect(
        """graph @f on mesh<model=2> {
          %x = input 0                                   : f32[4, 8@model]
          %w = input 1                                   : f32[4, 1]
          %i = input 2                                   : i64[4, 1]
          %n = aten.zeros_like(%x)                       : f32[4, 8]
          %o = aten.scatter.value(%n, 1, %i, -1.0)       : f32[4, 8]
          %p = aten.mul.Tensor(%o, %w)                   : f32[4, 8]
          %s = aten.sum.dim_IntList(%p, [1], true)       : f32[4, 1]
          %y = aten.sub.Tensor(%p, %s)                   : f32[4, 8]
          %t = aten.scatter.value(%x, 1, %i, -1.0)       : f32[4, 8]
          %u = aten.mul.Tensor(%t, %w)                   : f32[4, 8]
          %v = aten.sum.dim_IntList(%u, [1], true)       : f32[4, 1]
          return %y, %v
        }""",
        SimplifyLookups(),
    )


def test_a_sum_of_one_term_is_that_term_where_padding_is_cleared(expect: Expect) -> None:
    """The second mask is not that of the padding, but the user's."""
    expect(
        """graph @f on mesh<model=2> {
          %x = input 0                                   : f32[4, 7+1@model]
          %w = input 1                                   : f32[4, 1]
          %i = input 2                                   : i64[4, 1]
          %a = aten.arange(8, dtype=i64)                 : i64[7+1]
          %m = aten.ge.Scalar(%a, 7)                     : bool[7+1]
          %l = aten.ge.Scalar(%a, 6)                     : bool[7+1]
          %n = aten.zeros_like(%x)                       : f32[4, 7+1]
          %o = aten.scatter.value(%n, 1, %i, -1.0)       : f32[4, 7+1]
          %p = aten.mul.Tensor(%o, %w)                   : f32[4, 7+1]
          %q = aten.masked_fill.Scalar(%p, %m, 0.0)      : f32[4, 7+1]
          %s = aten.sum.dim_IntList(%q, [1], true)       : f32[4, 1]
          %y = aten.sub.Tensor(%q, %s)                   : f32[4, 7+1]
          %t = aten.masked_fill.Scalar(%p, %l, 0.0)      : f32[4, 7+1]
          %v = aten.sum.dim_IntList(%t, [1], true)       : f32[4, 1]
          %z = aten.sum.dim_IntList(%q, none)            : f32[]
          return %y, %v, %z
        }""",
        SimplifyLookups(),
    )


def test_a_sharded_weight_is_gathered_for_a_sharded_batch(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> {
          %x = input 0                           : f32[64@data, 16]
          %w = state "w"                         : f32[16, 8@data]
          %y = aten.mm(%x, %w)                   : f32[64, 8]
          return %y
        }""",
        PartitionByMesh("data"),
    )


def test_a_contraction_over_a_sharded_dim_is_reduced_where_it_is_used(expect: Expect) -> None:
    expect(
        """graph @f on mesh<model=2> {
          %x = input 0                           : f32[64, 16@model]
          %w = state "w"                         : f32[16@model, 8]
          %y = aten.mm(%x, %w)                   : f32[64, 8]
          %z = aten.relu(%y)                     : f32[64, 8]
          return %z
        }""",
        PartitionByMesh("model"),
    )


def test_a_gradient_for_sharded_state_is_scattered(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> {
          %x = input 0                           : f32[64@data, 16]
          %g = input 1                           : f32[64@data, 8]
          %w = state "w"                         : f32[16@data, 8]
          %t = aten.permute(%x, [1, 0])          : f32[16, 64]
          %d = aten.mm(%t, %g)                   : f32[16, 8]
          %n = aten.sub.Tensor(%w, %d)           : f32[16, 8]
          update "w" = %n
          return %n
        }""",
        PartitionByMesh("data"),
    )


def test_a_layout_is_kept_and_leaves_no_op(expect: Expect) -> None:
    expect(
        """graph @f on mesh<model=2> {
          %x = input 0                           : f32[4, 16@model]
          %w = state "w"                         : f32[16@model, 8]
          %y = aten.mm(%x, %w)                   : f32[4, 8]
          %c = constrain(%y, "[@model, -]")      : f32[4, 8]
          return %c
        }""",
        PartitionByMesh("model"),
    )


def test_an_all_reduce_of_which_a_block_is_used_becomes_a_reduce_scatter(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %p = input 0                           : f32[8] partial<sum: data>
          %r = all_reduce([%p], ["data"], "sum") : (f32[8])
          %g = getitem(%r, 0)                    : f32[8]
          %s = shard(%g, "data", 0)              : f32[4] of f32[8@data]
          return %s
        }""",
        SimplifyReductions(),
    )


def test_reductions_over_two_dims_become_one(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2, model=2> partitioned<data, model> {
          %p = input 0                            : f32[8] partial<sum: data,model>
          %r = all_reduce([%p], ["data"], "sum")  : (f32[8] partial<sum: model>)
          %g = getitem(%r, 0)                     : f32[8] partial<sum: model>
          %q = all_reduce([%g], ["model"], "sum") : (f32[8])
          %h = getitem(%q, 0)                     : f32[8]
          return %h
        }""",
        SimplifyReductions(),
    )


def test_gradients_travel_in_one_bucket(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %p = state "a"                          : f32[8]
          %q = state "b"                          : f32[8]
          %x = input 0                            : f32[8] partial<sum: data>
          %r = all_reduce([%x], ["data"], "sum")  : (f32[8])
          %g = getitem(%r, 0)                     : f32[8]
          %y = aten.mul.Tensor(%x, 2.0)           : f32[8] partial<sum: data>
          %s = all_reduce([%y], ["data"], "sum")  : (f32[8])
          %h = getitem(%s, 0)                     : f32[8]
          %a = aten.sub.Tensor(%p, %g)            : f32[8]
          %b = aten.sub.Tensor(%q, %h)            : f32[8]
          update "a" = %a
          update "b" = %b
          return
        }""",
        JoinCollectives(),
    )


def test_a_layers_parameters_are_gathered_together_and_late(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %a = state "layers.0.a"                 : f32[4] of f32[8@data]
          %b = state "layers.0.b"                 : f32[4] of f32[8@data]
          %c = state "layers.1.a"                 : f32[4] of f32[8@data]
          %r = all_gather([%a], ["data"], [0])    : (f32[8])
          %g = getitem(%r, 0)                     : f32[8]
          %x = aten.relu(%g)                      : f32[8]
          %s = all_gather([%b], ["data"], [0])    : (f32[8])
          %h = getitem(%s, 0)                     : f32[8]
          %y = aten.mul.Tensor(%x, %h)            : f32[8]
          %t = all_gather([%c], ["data"], [0])    : (f32[8])
          %i = getitem(%t, 0)                     : f32[8]
          %z = aten.mul.Tensor(%y, %i)            : f32[8]
          return %z
        }""",
        JoinCollectives(),
    )


def test_what_moves_a_view_of_what_came_comes_after_it(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %x = input 0                                     : f32[2, 8] of f32[4@data, 8]
          %r = all_to_all([%x], ["data"], [0], [1])        : (f32[4, 4] of f32[4, 8@data])
          %a = getitem(%r, 0)                              : f32[4, 4] of f32[4, 8@data]
          %v = aten.permute(%a, [1, 0])                    : f32[4, 4] of f32[8@data, 4]
          %s = all_to_all([%v], ["data"], [0], [1])        : (f32[8, 2] of f32[8, 4@data])
          %b = getitem(%s, 0)                              : f32[8, 2] of f32[8, 4@data]
          return %b
        }""",
        JoinCollectives(),
    )


def test_a_metric_behind_the_optimizer_comes_before_the_commit(expect: Expect) -> None:
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %w = state "w"                         : f32[8]
          %v = state "v"                         : f32[8]
          %g = input 0                           : f32[8]
          %i = input 1                           : i64[1]
          %a = aten.sub.Tensor(%w, %g)           : f32[8]
          %d = aten.mul.Tensor(%g, 0.5)          : f32[8]
          %b = aten.sub.Tensor(%v, %d)           : f32[8]
          %e = aten.exp(%g)                      : f32[8]
          %m = aten.index_select(%e, 0, %i)      : f32[1]
          update "w" = %a
          update "v" = %b
          return %m
        }""",
        CommitLast(),
    )


def test_a_running_mean_is_updated_behind_the_loss(expect: Expect) -> None:
    """Two calls move down, rather than all between them up."""
    expect(
        """graph @f on mesh<data=2> partitioned<data> {
          %mean = state "mean"                   : f32[8]
          %w = state "w"                         : f32[8]
          %x = input 0                           : f32[8]
          %i = input 1                           : i64[1]
          %old = aten.mul.Tensor(%mean, 0.9)     : f32[8]
          %new = aten.add.Tensor(%old, %x)       : f32[8]
          %y = aten.mul.Tensor(%x, %w)           : f32[8]
          %z = aten.exp(%y)                      : f32[8]
          %p = aten.neg(%z)                      : f32[8]
          %m = aten.index_select(%p, 0, %i)      : f32[1]
          %g = aten.mul.Tensor(%z, %x)           : f32[8]
          %n = aten.sub.Tensor(%w, %g)           : f32[8]
          update "mean" = %new
          update "w" = %n
          return %m
        }""",
        CommitLast(),
    )
