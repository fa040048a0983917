"""Pages in docs/ whose programs print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import python

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    name: (GUIDE / name).read_text()
    for name in ("checkpoints.md", "data.md", "meshes.md", "models.md", "parallelism.md", "pipelines.md", "tools.md")
}
WARNS = ("models.md",)
"""Of these pages programs say more on standard error: `transformers` does."""
PROGRAMS = [(name, number) for name, page in PAGES.items() for number in range(len(PROGRAM.findall(page)))]


@pytest.mark.parametrize(("name", "number"), PROGRAMS)
def test_a_program_prints_what_stands_below_it(
    name: str, number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program, output = PROGRAM.findall(PAGES[name])[number]
    (tmp_path / "program.py").write_text(program)
    result = python.run("program.py", cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert not result.stderr or name in WARNS
    if request.config.getoption("--rewrite"):
        before, page = f"```python\n{program}```\n\n```\n", (GUIDE / name).read_text()
        (GUIDE / name).write_text(page.replace(f"{before}{output}```", f"{before}{result.stdout}```"))
        return
    assert result.stdout == output


@pytest.mark.parametrize("name", PAGES)
def test_every_program_is_run(name: str) -> None:
    assert len(PROGRAM.findall(PAGES[name])) == PAGES[name].count("```python") > 0
