"""Ops that no sharding rule covers run whole: right, said once for each op and line, and refused on request."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch.compiler import partition
from monarch.compiler.context import Context
from monarch.compiler.errors import PerformanceWarning, RuleError
from monarch.compiler.graph import Graph
from monarch.compiler.partition import PartitionByMesh
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.rules import sharding_rule
from monarch.compiler.text import parse_graph
from tests.compiler.reference import run_reference


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    library = torch.library.Library("wholetest", "DEF")  # noqa: TOR901
    library.define("sorted_rows(Tensor x) -> (Tensor, Tensor)")
    library.define("misfit(Tensor x) -> Tensor")
    library.impl("misfit", torch.neg, "CompositeExplicitAutograd")
    library.define("joined(Tensor[] xs) -> Tensor")
    library.impl("sorted_rows", lambda x: tuple(x.sort(0)), "CompositeExplicitAutograd")
    library.impl("joined", lambda xs: torch.cat(list(xs)).flip(0), "CompositeExplicitAutograd")
    yield
    library._destroy()


def graph(calls: str, mesh: str = "data=2") -> Graph:
    return parse_graph(f"graph @f on mesh<{mesh}> {{\n{calls}\n}}")


def whole(made: Graph) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        return partition_graph(made)


def test_several_results_and_a_list_of_operands() -> None:
    made = graph(
        """
        %x = input 0                             : f32[4@data, 6@model]
        %y = input 1                             : f32[2, 6@model]
        %s = wholetest.sorted_rows(%x)           : (f32[4, 6], i64[4, 6])
        %v = getitem(%s, 0)                      : f32[4, 6]
        %i = getitem(%s, 1)                      : i64[4, 6]
        %j = wholetest.joined([%v, %y])          : f32[6, 6]
        %m = aten.mul.Tensor(%v, %x)             : f32[4, 6]
        return %j, %i, %m
        """,
        "data=2, model=2",
    )
    inputs: dict[str | int, Any] = {0: torch.randn(4, 6), 1: torch.randn(2, 6)}
    dense, _ = run_reference(made, inputs)
    spread, _ = run_reference(whole(made), inputs)
    for a, b in zip(dense, spread, strict=True):
        assert torch.equal(a, b)


def test_a_pending_sum_is_reduced_for_it() -> None:
    made = graph(
        """
        %x = input 0                             : f32[4, 8@data]
        %w = input 1                             : f32[8@data, 4]
        %y = aten.mm(%x, %w)                     : f32[4, 4]
        %s = wholetest.sorted_rows(%y)           : (f32[4, 4], i64[4, 4])
        %v = getitem(%s, 0)                      : f32[4, 4]
        return %v
        """
    )
    inputs: dict[str | int, Any] = {0: torch.randn(4, 8), 1: torch.randn(8, 4)}
    dense, _ = run_reference(made, inputs)
    spread, _ = run_reference(whole(made), inputs)
    torch.testing.assert_close(spread[0], dense[0])


SORTED = """
    %x = input 0                             : f32[4@data, 6]
    %s = wholetest.sorted_rows(%x)           : (f32[4, 6], i64[4, 6])  # train.py:{line}
    %v = getitem(%s, 0)                      : f32[4, 6]
    return %v
"""


def test_it_is_said_once_for_each_op_and_line() -> None:
    with pytest.warns(PerformanceWarning) as said:
        for line in (3, 3, 8):
            partition_graph(graph(SORTED.format(line=line)))
    assert [(warning.filename, warning.lineno) for warning in said] == [("train.py", 3), ("train.py", 8)]
    assert str(said[0].message) == (
        "wholetest.sorted_rows.default runs whole on every worker, with 96 B gathered for each call\n"
        "  If it computes each entry of dim 0 from the same entry of its operands alone, this rule shards it:\n"
        '      monarch.sharding_rule("wholetest.sorted_rows", "n _ -> n _, n _")'
    )


def test_a_rule_that_does_not_fit_is_said() -> None:
    sharding_rule("wholetest.misfit", "n m -> n")
    made = SORTED.replace("sorted_rows", "misfit").replace("(f32[4, 6], i64[4, 6])", "f32[4, 6]")
    made = made.replace("getitem(%s, 0)     ", "aten.neg(%s)")
    with pytest.warns(PerformanceWarning, match=r"Its sharding rule does not fit this call \(.*n m -> n"):
        partition_graph(graph(made.format(line=12)))


def test_the_last_lines_only_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process that makes programs without end does not grow."""
    monkeypatch.setattr(partition.whole, "REMEMBERED", 2)
    with pytest.warns(PerformanceWarning) as said:
        for line in (101, 102, 101, 103, 102, 101):
            partition_graph(graph(SORTED.format(line=line)))
    assert [warning.lineno for warning in said] == [101, 102, 103, 101]


def test_the_graph_says_why() -> None:
    text = str(whole(graph(SORTED.format(line=3))))
    assert "every worker computes all of it, with 96 B gathered: it has no sharding rule" in text


def test_nothing_is_said_where_nothing_is_gathered() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition_graph(graph(SORTED.format(line=5).replace("@data", "")))


def test_a_strict_program_refuses_it_with_the_line_and_the_way_out() -> None:
    with pytest.raises(RuleError) as error:
        PartitionByMesh("data").run(graph(SORTED.format(line=3)), Context(CompileOptions(strict=True)))
    assert str(error.value) == (
        "train.py:3: error: wholetest.sorted_rows.default runs whole on every worker, with 96 B gathered for each "
        "call\n  If it computes each entry of dim 0 from the same entry of its operands alone, this rule shards it:\n"
        '      monarch.sharding_rule("wholetest.sorted_rows", "n _ -> n _, n _")\n'
        "  Leave out strict=True to run the whole op on every worker, or give it replicated operands."
    )
