"""Each rule of docs/reference/check.md: the linter finds the wrong code, passes the right, and the tracer agrees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monarch.compiler.errors import MonarchError
from monarch.language import Mesh
from monarch.language.check import RULES, check_source, level
from tests.language.conftest import mesh

__all__ = ["mesh"]

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "check.md").read_text()
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
SHARED = CODE.search(TEXT[: TEXT.index("## Values")])[1]  # type: ignore[index]
SECTIONS = {
    found[1]: (found[2], CODE.findall(found[3]))
    for found in re.finditer(r"### (M\d+): (.*)\n((?:(?!\n##).|\n(?!##))*)", TEXT)
}


def test_every_rule_is_documented_in_order() -> None:
    assert {code: title for code, (title, _) in SECTIONS.items()} == RULES
    assert list(SECTIONS) == sorted(RULES)
    assert all(len(codes) == 2 for _, codes in SECTIONS.values())


@pytest.mark.parametrize("code", SECTIONS)
def test_the_linter_finds_the_wrong_code_and_passes_the_right(code: str) -> None:
    wrong, right = SECTIONS[code][1]
    (finding,) = check_source(SHARED + wrong, "train.py")
    assert finding.code == code
    assert "wrong" in (SHARED + wrong).splitlines()[finding.line - 1]
    assert check_source(SHARED + right, "train.py") == []


def run(code: str, folder: Path) -> None:
    path = folder / "train.py"
    path.write_text(SHARED + code)
    exec(compile(SHARED + code, str(path), "exec"), {"__name__": "train"})


@pytest.mark.parametrize("code", SECTIONS)
def test_the_tracer_agrees(code: str, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is an error is refused, at the line that the linter names; warnings, and what is right, are taken."""
    monkeypatch.chdir(tmp_path)  # some write files
    wrong, right = SECTIONS[code][1]
    run(right, tmp_path)
    if level(code) == "warning":
        run(wrong, tmp_path)
        return
    with pytest.raises((MonarchError, RuntimeError)) as error:
        run(wrong, tmp_path)
    (finding,) = check_source(SHARED + wrong, "train.py")
    source = getattr(error.value, "source", None)
    if source is not None and source.file == str(tmp_path / "train.py") and code not in ("M201", "M203"):
        assert source.line == finding.line
