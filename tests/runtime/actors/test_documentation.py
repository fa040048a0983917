"""docs/guide/actors.md: its programs print what stands below them, and each promise has a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import python

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = (ROOT / "docs" / "guide" / "actors.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def names_in(file: str) -> set[str]:
    names = set()
    for statement in ast.parse(((ROOT if file.startswith("tests/") else HERE) / file).read_text()).body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            names.add(statement.targets[0].id)  # a Hypothesis test case
    return names


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_prints_what_stands_below_it(number: int, tmp_path: Path) -> None:
    program, output = PROGRAMS[number]
    (tmp_path / "program.py").write_text(program)
    result = python.run("program.py", cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == output


def test_every_program_is_run() -> None:
    assert len(PROGRAMS) == PAGE.count("```python") > 0


def test_each_promise_has_a_test_that_exists() -> None:
    promises = PAGE.split("## Promises")[1].split("\n## ")[0]
    rows = [row for row in re.findall(r"^\| (.*?) \| (.*?) \|$", promises, re.MULTILINE) if not row[0].startswith("**")]
    assert len(rows) > 30
    for promise, tests in rows:
        named = re.findall(r"`([\w/.]+\.py)::(\w+)`", tests)
        assert named, promise
        for file, name in named:
            assert name in names_in(file), f"{promise}: {file}::{name}"


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"`(examples/\w+\.py)`", PAGE))
    using = {
        f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py") if "monarch.actor" in path.read_text()
    }
    assert listed == using
