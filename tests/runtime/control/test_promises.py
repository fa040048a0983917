"""The tests that the documents name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("document", ["control-plane.md", "security.md"])
def test_each_promise_is_held_by_a_test_that_exists(document: str) -> None:
    text = (ROOT / "docs" / "internals" / document).read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 15 and not named - written
