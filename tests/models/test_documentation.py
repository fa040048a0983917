"""docs/models.md: each snippet prints what stands below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import python

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("code", "output"), SNIPPETS, ids=[str(number) for number in range(len(SNIPPETS))])
def test_a_snippet_prints_what_stands_below_it(code: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(code)
    result = python.run("snippet.py", cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout == output


def test_every_snippet_has_an_output() -> None:
    assert len(SNIPPETS) == PAGE.count("```python")
