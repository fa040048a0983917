"""A seeded sample of PyTorch's op database: nothing in it is wrong. `make test-ops` plays all of it."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.rules.line import bind, line
from tests.ops.__main__ import text
from tests.ops.judge import judge
from tests.ops.scoreboard import REFUSED, RIGHT, WHOLE, WRONG, Entry, entries, full_name, play, sample_of

CHOSEN = (
    "addmm cumsum index_put matmul nn.functional.layer_norm nn.functional.rrelu cdist pow as_strided take_along_dim "
    "nn.functional.max_unpool2d"
).split()
"""Entries that were wrong once, or that show an outcome each."""


@pytest.mark.sample(10)
@pytest.mark.parametrize("number", range(45))
def test_a_sample_is_not_wrong(number: int) -> None:
    entry = play(sample_of(45, seed=20261122)[number], samples=2)
    assert not entry.outcomes[WRONG], (entry.name, entry.reasons)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_entries_are_not_wrong(name: str) -> None:
    (op,) = (op for op in entries([name]) if full_name(op) == name)
    entry = play(op, samples=3)
    assert entry.outcomes.total() and not entry.outcomes[WRONG], entry.reasons


JUDGED = "mm addmm sum mean softmax cumsum gather scatter_add nn.functional.layer_norm".split()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", JUDGED)
def test_pytorchs_own_judge_finds_no_rule_incorrect_or_missing(name: str) -> None:
    pytest.importorskip("torch.distributed.tensor._ops.strategy_validation", reason="this torch has no such judge")
    (op,) = (op for op in entries([name]) if full_name(op) == name)
    found = judge(op, torch.float64, samples=2)
    assert found.correct and not found.incorrect and not found.missing


def test_pytorchs_own_judge_notices_a_rule_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.distributed.tensor._ops.strategy_validation", reason="this torch has no such judge")
    from torch.testing._internal.opinfo.core import SampleInput  # which changes settings of the process

    (op,) = (op for op in entries(["sigmoid"]) if full_name(op) == "sigmoid")
    monkeypatch.setattr("tests.ops.judge.rule_for", lambda *_: bind(line("a -> a", linear=[{0}]), [(4,)], [(4,)]))
    monkeypatch.setattr(
        op, "sample_inputs_func", lambda *_, **__: iter([SampleInput(torch.linspace(-1, 1, 4).double())])
    )
    assert "aten.sigmoid.default" in judge(op, torch.float64, samples=1).incorrect


def test_the_table_counts_the_worst_outcome_of_each_entry() -> None:
    right, part, wrong = Entry("a"), Entry("b"), Entry("c")
    right.add(RIGHT)
    part.add(WHOLE)
    part.add(REFUSED, "it cannot be")
    wrong.add(RIGHT)
    wrong.add(WRONG, "x | y")
    lines = text([right, part, wrong, Entry("none")], 1).splitlines()
    assert "| right | 1 | 2 |" in lines and "| refused in part | 1 | |" in lines and "| wrong | 1 | 1 |" in lines
    assert "| c | 1, 0, 0, 1 | x \\| y |" in lines
    assert lines[-1].startswith(
        "1 entries right throughout, 1 refused in whole or in part, 1 wrong. Of 3 right results 1"
    )
