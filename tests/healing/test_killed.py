"""A controller that is killed at any moment goes on from its last checkpoint: each row is in one applied step of each
epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import monarch
from tests import python
from tests.healing.killed import EPOCHS, ROWS, rows_of
from tests.sample import is_full


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6 if is_full() else 1))
def test_each_row_is_in_one_step_of_the_history_that_survives(seed: int, tmp_path: Path) -> None:
    python.run("-m", "tests.healing.killed", tmp_path, seed, 6 if is_full() else 3, check=True, timeout=500)
    into = {"seen": torch.zeros(ROWS, dtype=torch.int64), "last": torch.zeros(ROWS, dtype=torch.int64), "step": 0}
    monarch.load(tmp_path / "last", into=into)
    assert into["seen"].tolist() == [EPOCHS] * ROWS  # type: ignore[attr-defined]
    expected = torch.zeros(ROWS, dtype=torch.int64)
    steps = 0
    for steps, batch in enumerate(rows_of(None), 1):
        expected[batch] = steps
    assert torch.equal(into["last"], expected) and into["step"] == steps  # type: ignore[arg-type]
