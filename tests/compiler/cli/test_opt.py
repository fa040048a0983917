"""`monarchc opt`: text in, text out."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from monarch.compiler.pipeline import PASSES
from tests.compiler.cli.conftest import Run

GRAPH = """\
graph @g on mesh<data=2> {
  %x = input 0                  : f32[4@data, 8]
  %y = aten.sum.dim_IntList(%x, [0]) : f32[8]
  return %y
}
"""


def test_passes_in_order(folder: Path, monarchc: Run) -> None:
    (folder / "g.txt").write_text(GRAPH)
    half = monarchc("opt", "g.txt", "--passes", "simplify-views, partition-by-data").out
    assert half.startswith("graph @g on mesh<data=2> partitioned<data> {")
    assert "all_reduce" in half
    (folder / "half.txt").write_text(half)
    whole = monarchc("opt", "g.txt", "--passes", "simplify-views,partition-by-mesh,join-collectives").out
    assert monarchc("opt", "half.txt", "--passes", "join-collectives").out == whole


def test_no_pass_prints_the_graph_in_its_own_form(folder: Path, monarchc: Run) -> None:
    (folder / "g.txt").write_text(GRAPH)
    printed = monarchc("opt", "g.txt").out
    (folder / "printed.txt").write_text(printed)
    assert monarchc("opt", "printed.txt").out == printed


def test_from_standard_input(monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GRAPH.encode())))
    shown = json.loads(monarchc("opt", "-", "--passes", "partition-by-mesh", "--json").out)
    assert shown["passes"] == ["partition-by-mesh"] and "partitioned<data>" in shown["graph"]


def test_an_error_stands_at_its_character(folder: Path, monarchc: Run) -> None:
    (folder / "g.txt").write_text(GRAPH.replace("[0]) ", "[0) "))
    error = monarchc("opt", "g.txt", code=2).err
    assert "g.txt:3:35: error: expected ',' or ']', not ')'" in error
    assert error.splitlines()[2].index("^") == error.splitlines()[1].index("[0)") + 2


def test_a_graph_that_a_pass_refuses(folder: Path, monarchc: Run) -> None:
    (folder / "g.txt").write_text(GRAPH)
    twice = monarchc("opt", "g.txt", "--passes", "partition-by-data,partition-by-data", code=2).err
    assert "partitioned by 'data' already" in twice


def test_the_passes_there_are(monarchc: Run) -> None:
    shown = json.loads(monarchc("opt", "--list", "--json").out)
    assert list(shown) == list(PASSES) and all(shown.values())
    assert all(name in monarchc("opt", "--list").out for name in PASSES)
