"""Simpler forms of a nest compute the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given

from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.interpret import interpret
from monarch.compiler.loops.ir import Kernel, Position
from monarch.compiler.loops.nests import joined, live, operands, over, renumbered
from monarch.compiler.loops.text import parse_kernel, print_kernel
from tests.compiler.kernels.checking import check_results
from tests.compiler.kernels.checking import operands as tensors_of
from tests.compiler.kernels.strategies import kernels

SHAPES = {
    "rows run on": ((4, 6, 5), "[30, 5, 1]", "[30, 5, 1]", "[120]"),
    "one of size 1 is left out": ((4, 1, 5), "[5, 0, 1]", "[5, 0, 1]", "[20]"),
    "columns do not": ((4, 6, 5), "[1, 20, 4]", "[30, 5, 1]", "[4, 30]"),
    "broadcast dims join each other": ((4, 6, 5), "[0, 0, 1]", "[30, 5, 1]", "[24, 5]"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_joined(name: str) -> None:
    dims, load, store, expected = SHAPES[name]
    count = math.prod(dims)
    kernel = parse_kernel(
        f"kernel k(a0: f32[{count}]) -> (b0: f32[{count}])\n"
        f"nest [{', '.join(map(str, dims))}] {{\n  %0 = load a0 {load}\n  %1 = store b0 {store} %0\n}}\n"
    )
    (nest,) = kernel.nests
    wanted = [dim for dim, size in enumerate(nest.dims) if size > 1]
    assert f"nest {expected} " in print_kernel(replace(kernel, nests=(joined(nest, wanted),)))


def test_kept_dims_join_no_reduced_ones_and_positions_stay() -> None:
    kernel = parse_kernel(
        "kernel k(a0: f32[4, 6, 5]) -> (b0: i64[4])\n"
        "nest [4 | 6, 5] {\n  %0 = load a0 [30, 5, 1]\n  %1 = reduce sum %0\n  %2 = cast i64(%1)\n"
        "  %3 = position 0\n  %4 = add i64(%2, %3)\n  %5 = store b0 [1, 0, 0] %4\n}\n"
    )
    (nest,) = kernel.nests
    simple = joined(nest, range(3))
    assert (simple.dims, simple.reduced, simple.body[3]) == ((4, 30), 1, Position(0))


@given(kernels(sums=True))
def test_a_nest_over_fewer_dims_computes_the_same(kernel: Kernel) -> None:
    simple = [joined(nest, [dim for dim, size in enumerate(nest.dims) if size > 1]) for nest in kernel.nests]
    for nest, before in zip(simple, kernel.nests, strict=True):
        assert len(nest.dims) <= len(before.dims) and 1 not in nest.dims
    made = replace(kernel, nests=tuple(simple))
    tensors = tensors_of(kernel)
    check_results(kernel, tensors, interpret(made, tensors), tolerance=1e-4)


@given(kernels(sums=True))
def test_what_is_live_computes_the_same_alone(kernel: Kernel) -> None:
    nests = []
    for nest in kernel.nests:
        used = sorted(live(nest.body))
        place = {number: at for at, number in enumerate(used)}
        nests.append(replace(nest, body=tuple(renumbered(nest.body[number], place) for number in used), lines=()))
        assert all(operand in place for number in used for operand in operands(nest.body[number]))
    made = replace(kernel, nests=tuple(nests))
    check_kernel(made)
    tensors = tensors_of(kernel)
    check_results(kernel, tensors, interpret(made, tensors), tolerance=1e-4)


def test_gathers_are_live_where_they_may_fail() -> None:
    kernel = parse_kernel(
        "kernel k(a0: i64[4], a1: f32[9]) -> (b0: i64[4])\n"
        "nest [4] {\n  %0 = load a0 [1]\n  %1 = load a1 [0] gather %0 * 1 of 9\n  %2 = store b0 [1] %0\n}\n"
    )
    (nest,) = kernel.nests
    assert live(nest.body) == {0, 2}
    assert live(nest.body, gathers=True) == {0, 1, 2}


def test_dims_that_are_in_no_other_have_position_0() -> None:
    kernel = parse_kernel(
        "kernel k() -> (b0: i64[4])\nnest [1, 4] {\n  %0 = position 0\n  %1 = store b0 [0, 1] %0\n}\n"
    )
    (nest,) = kernel.nests
    made = replace(kernel, nests=(over(nest, [(1,)]),))
    assert interpret(made, [])[0].tolist() == [0, 0, 0, 0]
