"""docs/meshes.md: its programs print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import python

PATH = Path(__file__).parents[3] / "docs" / "meshes.md"
PAGE = PATH.read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_prints_what_stands_below_it(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program, output = PROGRAMS[number]
    (tmp_path / "program.py").write_text(program)
    result = python.run("program.py", cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert (result.returncode, result.stderr) == (0, "")
    if request.config.getoption("--rewrite"):
        before, after = f"```python\n{program}```\n\n```\n", "```\n"
        PATH.write_text(PATH.read_text().replace(f"{before}{output}{after}", f"{before}{result.stdout}{after}"))
        return
    assert result.stdout == output


def test_programs_with_output_are_found() -> None:
    assert PROGRAMS
