"""Keys of calls that are alike, and what is remembered by them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from monarch.compiler.alike import Memo, frozen


def key(value: object) -> object:
    return frozen(value, lambda operand: "operand")


def test_numbers_that_python_holds_equal_have_keys_of_their_own() -> None:
    numbers = [1, 1.0, True, 0, 0.0, -0.0, False, complex(0.0, 0.0), complex(0.0, -0.0)]
    assert len({key(number) for number in numbers}) == len(numbers)
    assert key(float("nan")) == key(float("nan"))


def test_lists_tuples_and_dicts_are_keys_of_what_they_hold() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert key([x, (1, "sum")]) == key((x, [1, "sum"])) == ("operand", (1, (str, "sum")))
    assert key({"dim": [0]}) != key({"dim": [1]})
    assert key(torch.float32) != key(torch.float64)
    assert key("1") != key(1)


def test_an_operand_is_what_the_caller_says() -> None:
    assert frozen([torch.empty(2, 3)], lambda tensor: tuple(tensor.shape)) == ((2, 3),)


def test_what_has_no_hash_has_no_key() -> None:
    for value in ({1, 2}, [slice(0, 2), {3}], torch.nn.Parameter(torch.empty(2))):
        with pytest.raises(TypeError):
            key(value)


def test_a_memo_holds_so_many_and_then_begins_anew() -> None:
    memo: Memo[int] = Memo(2)
    assert [memo.keep(number, number * 10) for number in range(3)] == [0, 10, 20]
    assert [memo.get(number) for number in range(3)] == [None, None, 20]
