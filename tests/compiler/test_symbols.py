"""Sizes that are expressions: they compute as the numbers they stand for do, every decision on them is noted."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.errors import MonarchError
from monarch.compiler.symbols import (
    LEAST,
    Scope,
    common_factor,
    example,
    has_names,
    is_multiple,
    same,
    symbol,
    value_at,
)
from monarch.compiler.text import parse_type
from monarch.compiler.types import MeshSpec

NAMES = ("a", "b", "c")
VALUES = st.fixed_dictionaries({name: st.integers(LEAST, 40) for name in NAMES})
ARITHMETIC: list[Callable[[int, int], int]] = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
]
COMPARED = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
Steps = list[tuple[Callable[[int, int], int], str | int]]
STEPS = st.lists(st.tuples(st.sampled_from(ARITHMETIC), st.sampled_from([*NAMES, 1, 2, 3, 4, 7])), max_size=6)


def computed(steps: Steps, of: dict[str, int]) -> int:
    found = of["a"]
    for step, operand in steps:
        found = step(found, of[operand] if isinstance(operand, str) else operand)
    return found


@given(STEPS, VALUES, VALUES)
def test_expressions_compute_as_numbers(steps: Steps, first: dict[str, int], second: dict[str, int]) -> None:
    scope = Scope(first)
    size = computed(steps, {name: symbol(name, scope) for name in NAMES})
    assert example(size) == computed(steps, first)
    if scope.holds(second):
        assert value_at(size, second) == computed(steps, second)


@given(STEPS, STEPS, st.sampled_from(COMPARED), VALUES, st.lists(VALUES, min_size=8, max_size=8))
def test_decisions_are_noted(
    left: Steps,
    right: Steps,
    compare: Callable[[int, int], bool],
    values: dict[str, int],
    others: list[dict[str, int]],
) -> None:
    scope = Scope(values)
    names = {name: symbol(name, scope) for name in NAMES}
    found = compare(computed(left, names), computed(right, names))
    assert found is compare(computed(left, values), computed(right, values))
    for other in others:
        if scope.holds(other):
            assert compare(computed(left, other), computed(right, other)) is found


def test_a_size_passes_for_an_int_and_never_for_one_of_c() -> None:
    scope = Scope({"t": 6})
    size = symbol("t", scope)
    assert isinstance(size, int) and has_names([(size,)])
    assert not scope.conditions
    assert torch.ones(12)[:size].shape == (6,)
    assert [str(condition) for condition in scope.conditions] == ["t == 6"]


def test_what_is_always_so_is_not_noted() -> None:
    scope = Scope({"b": 4, "t": 9})
    b, t = symbol("b", scope), symbol("t", scope)
    assert b != 1 and b > 0 and b * t > t and b * t + 1 != t and t < 2**63 - 1 and (4 * b) % 2 == 0
    assert (b * t) // t is not b and same((b * t) // t, b)
    assert not scope.conditions


def test_multiples_are_known_where_they_were_decided() -> None:
    scope = Scope({"b": 4, "t": 9})
    b, t = symbol("b", scope), symbol("t", scope)
    assert not is_multiple(b, 2) and is_multiple(6 * b, 2)
    assert b % 2 == 0
    assert is_multiple(b, 2) and is_multiple(b * t, 2) and not is_multiple(t, 2)
    assert same((b // 2) * 2, b) and str(b // 2) == "(b/2)"
    assert [str(condition) for condition in scope.conditions] == ["(b%2) == 0"]
    assert scope.holds({"b": 6, "t": 5}) and not scope.holds({"b": 5, "t": 5})


def test_common_factors_are_those_that_expressions_show() -> None:
    scope = Scope({"b": 4, "t": 9})
    b, t = symbol("b", scope), symbol("t", scope)
    assert same(common_factor(6 * b * t, 4 * b), 2 * b)
    assert common_factor(b, t) == 1 and common_factor(12, 8) == 4
    assert not scope.conditions


def test_blocks_of_a_named_size_are_rounded_up() -> None:
    mesh = MeshSpec.of(data=4)
    for rows, block in ((8, 2), (9, 3)):
        scope = Scope({"b": rows})
        written = parse_type("f32[b@data, 3]")
        type_ = type(written)(written.dtype, (symbol("b", scope), 3), written.layout)
        local = type_.local_shape(mesh)
        assert value_at(local, {"b": rows}) == (block, 3)
        assert scope.holds({"b": rows + 4}) and not scope.holds({"b": rows + 1 if rows == 8 else rows - 1})


def test_a_size_without_a_scope_decides_nothing() -> None:
    size = symbol("t")
    assert size == symbol("t") and size != symbol("u")
    with pytest.raises(MonarchError, match="the size t has no value here"):
        bool(size > 3)
    with pytest.raises(MonarchError, match="the size t has no value here"):
        int(size)
