"""Values that depend on no value with a dim are born in the layout that their readers take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.text import parse_graph
from tests.compiler.reference import run_reference


def graph(calls: str, mesh: str = "data=2, model=2") -> Graph:
    return parse_graph(f"graph @f on mesh<{mesh}> {{\n{calls}\n}}")


FILLED = """
    %x = input 0                                    : f32[8@data, 4@model]
    %one = aten.full([8, 4], 1.0, dtype=f32)        : f32[8, 4]
    %y = aten.sub.Tensor(%one, %x)                  : f32[8, 4]
    return %y
"""
MASKED = """
    %x = input 0                                    : f32[8@data, 4@model]
    %r = aten.arange.start_step(0, 8, 1, dtype=i64) : i64[8]
    %c = aten.arange.start_step(0, 4, 1, dtype=i64) : i64[4]
    %v = aten.view(%r, [8, 1])                      : i64[8, 1]
    %m = aten.gt.Tensor(%v, %c)                     : bool[8, 4]
    %n = aten.full([], -1.0, dtype=f32)             : f32[]
    %y = aten.where.self(%m, %x, %n)                : f32[8, 4]
    return %y
"""
DROPPED = """
    %seed = seed "seed"                                                     : i64[]
    %x = input 0                                                            : f32[8@data, 4@model]
    %u = random("uniform", [8, 4], f32, %seed, 0, [8, 4], [[], []])         : f32[8, 4]
    %k = aten.lt.Scalar(%u, 0.5)                                            : bool[8, 4]
    %d = aten._to_copy(%k, dtype=f32)                                       : f32[8, 4]
    %y = aten.mul.Tensor(%x, %d)                                            : f32[8, 4]
    return %y
"""
EXPANDED = """
    %x = input 0                                    : f32[8@data, 4@model]
    %s = aten.sum(%x)                               : f32[]
    %e = aten.expand(%s, [8, 4])                    : f32[8, 4]
    %y = aten.mul.Tensor(%e, %x)                    : f32[8, 4]
    return %y
"""


@pytest.mark.parametrize("calls", [FILLED, MASKED, DROPPED, EXPANDED])
def test_no_worker_makes_the_whole_to_keep_a_shard(calls: str) -> None:
    made = graph(calls)
    spread = partition_graph(made)
    assert "shard(" not in str(spread).replace("arange_shard(", "")
    largest = max(
        spread.local_shape(node.meta["type"]) for node in spread.calls if not isinstance(node.meta["type"], tuple)
    )
    assert largest <= (4, 2)
    inputs: dict[str | int, Any] = {0: torch.randn(8, 4), "seed": torch.tensor(7)}
    for a, b in zip(run_reference(made, inputs)[0], run_reference(spread, inputs)[0], strict=True):
        torch.testing.assert_close(a, b)


def test_it_brings_no_sharding_to_its_readers() -> None:
    text = str(partition_graph(graph(FILLED.replace("@data", "").replace("@model", ""))))
    assert "@" not in text.splitlines()[3] and "f32[8, 4]" in text


def test_a_reader_that_takes_the_whole_leaves_it_whole() -> None:
    made = graph(
        """
        %x = input 0                                    : f32[8@data, 4]
        %w = input 1                                    : f32[4, 8]
        %one = aten.full([8, 4], 1.0, dtype=f32)        : f32[8, 4]
        %y = aten.sub.Tensor(%one, %x)                  : f32[8, 4]
        %z = aten.mm(%w, %one)                          : f32[4, 4]
        return %y, %z
        """
    )
    spread = partition_graph(made)
    assert "all_gather" not in str(spread) and "all_reduce" not in str(spread)
    inputs: dict[str | int, Any] = {0: torch.randn(8, 4), 1: torch.randn(4, 8)}
    for a, b in zip(run_reference(made, inputs)[0], run_reference(spread, inputs)[0], strict=True):
        torch.testing.assert_close(a, b)
