"""Pages in docs/ whose programs print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import python

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GUIDE = "checkpoints data eager layouts meshes models ops parallelism pipelines precision random tools".split()
NAMES = [*(f"guide/{name}.md" for name in GUIDE), "reference/plan.md"]
NAMES += [
    str(path.relative_to(DOCS))
    for folder in ("start", "howto", "migrate")
    for path in sorted((DOCS / folder).glob("*.md"))
    if "```python" in path.read_text()
]
PAGES = {name: (DOCS / name).read_text() for name in NAMES}
WARNS = ("guide/layouts.md", "guide/models.md", "howto/hugging-face.md")
"""Of these pages programs say more on standard error: `transformers` does."""
PROGRAMS = [(name, number) for name, page in PAGES.items() for number in range(len(PROGRAM.findall(page)))]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "number"), PROGRAMS)
def test_a_program_prints_what_stands_below_it(
    name: str, number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program, output = PROGRAM.findall(PAGES[name])[number]
    file = tmp_path / (re.match(r"# (\w+\.py)\n", program) or ["", "program.py"])[1]
    file.write_text(program)
    result = python.run(file.name, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert not result.stderr or name in WARNS
    if request.config.getoption("--rewrite"):
        before, page = f"```python\n{program}```\n\n```\n", (DOCS / name).read_text()
        (DOCS / name).write_text(page.replace(f"{before}{output}```", f"{before}{result.stdout}```"))
        return
    assert result.stdout == output


@pytest.mark.parametrize("name", PAGES)
def test_every_program_is_run(name: str) -> None:
    assert len(PROGRAM.findall(PAGES[name])) == PAGES[name].count("```python") > 0
