"""Which kernels become one of several nests."""

from __future__ import annotations

import pytest

from monarch.compiler.context import Context
from monarch.compiler.kernels import join
from monarch.compiler.kernels.fuse import FuseKernels
from monarch.compiler.kernels.join import JoinKernels
from monarch.compiler.loops.check import check_kernel
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph
from monarch.compiler.verify import verify
from tests.compiler.kernels.graphs import kernels_of


def joined(*lines: str) -> list[tuple[str, int]]:
    """The kernels of a program of two inputs of 8 rows and two of 9, by name; and how many nests each has."""
    inputs = [f"%{'abcd'[at]} = input {at} : f32[{rows}, {rows}]" for at, rows in enumerate((8, 8, 9, 9))]
    graph = parse_graph("graph @f on mesh<data=2> partitioned<data> {\n" + "\n".join([*inputs, *lines]) + "\n}")
    context = Context(CompileOptions(kernels="all"))
    made = JoinKernels().run(FuseKernels().run(graph, context), context)
    verify(made, after="join-kernels")
    for kernel in kernels_of(made):
        check_kernel(kernel)
    return [(kernel.name, len(kernel.nests)) for kernel in kernels_of(made)]


def test_kernels_that_do_the_same_are_one() -> None:
    lines = ["%e = aten.exp(%a) : f32[8, 8]", "%f = aten.exp(%c) : f32[9, 9]", "return %e, %f"]
    assert joined(*lines) == [("exp_x2", 2)]


def test_kernels_that_do_other_things_are_not() -> None:
    lines = ["%e = aten.exp(%a) : f32[8, 8]", "%f = aten.sin(%c) : f32[9, 9]", "return %e, %f"]
    assert joined(*lines) == [("exp", 1), ("sin", 1)]


def test_a_kernel_has_no_more_statements_than_one_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"%{name} = aten.exp(%{of}) : f32[{rows}, {rows}]" for name, of, rows in ("ea8", "fb8", "gc9", "hd9")]
    assert joined(*lines, "return %e, %f, %g, %h") == [("exp_x4", 4)]
    monkeypatch.setattr(join, "MOST_STATEMENTS", 3 * 3 + 1)  # a load, the exponential, a store
    assert joined(*lines, "return %e, %f, %g, %h") == [("exp_x3", 3), ("exp", 1)]


def test_kernels_on_both_sides_of_a_product_stay_apart() -> None:
    lines = [
        "%e = aten.exp(%a) : f32[8, 8]",
        "%p = aten.mm(%b, %b) : f32[8, 8]",
        "%f = aten.exp(%c) : f32[9, 9]",
        "return %e, %f, %p",
    ]
    assert joined(*lines) == [("exp", 1), ("exp", 1)]


def test_kernels_that_need_each_other_stay_apart() -> None:
    """Through an op that is in no kernel and computes little."""
    lines = [
        "%e = aten.exp(%a) : f32[8, 8]",
        "%v = aten.flip(%e, [0]) : f32[8, 8]",
        "%f = aten.exp(%v) : f32[8, 8]",
        "return %f",
    ]
    assert joined(*lines) == [("exp", 1), ("exp", 1)]


def test_kernels_that_are_one_do_not_wait_for_each_other() -> None:
    """Of the two sines one reads the first exponential, and the second exponential reads the other: whichever pair is
    one, the other two have to stay apart."""
    lines = [
        "%e = aten.exp(%a) : f32[8, 8]",
        "%v = aten.flip(%e, [0]) : f32[8, 8]",
        "%x = aten.sin(%v) : f32[8, 8]",
        "%y = aten.sin(%c) : f32[9, 9]",
        "%w = aten.flip(%y, [0]) : f32[9, 9]",
        "%f = aten.exp(%w) : f32[9, 9]",
        "return %x, %f",
    ]
    assert joined(*lines) == [("exp", 1), ("sin_x2", 2), ("exp", 1)]
