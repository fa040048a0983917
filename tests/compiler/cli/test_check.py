"""`monarchc check`: its formats and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compiler.cli.conftest import Run

ERROR = """\
import monarch

open("ran", "w")

@monarch.program
def step(x: "f32[4@data, 4]"):
    if x.sum() > 100%7:
        print("[bold]large")
    return x
"""
WARNING = "import monarch\n\n@monarch.program\ndef step(x: 'f32[4]'):\n    print(1)\n    return x\n"
CLEAN = "import monarch\n\n@monarch.program\ndef step(x: 'f32[4]'):\n    return x\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command runs, with programs in it."""
    (tmp_path / "error.py").write_text(ERROR)
    (tmp_path / "warning.py").write_text(WARNING)
    (tmp_path / "clean.py").write_text(CLEAN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_findings_as_text_and_nothing_is_run(files: Path, monarchc: Run) -> None:
    result = monarchc("check", "error.py", code=1)
    assert result.err == ""
    assert result.out.splitlines() == [
        "error.py:7:8: error[M101]: 'step' cannot branch on a tensor's value",
        "      if x.sum() > 100%7:",
        "         ^^^^^^^^^^^^^^^",
        "  if x.sum() > 100%7:                # wrong: "
        "the value lives on the workers, and this runs once, when the program is traced",
        "  y = torch.where(loss > 0.1, a, b)  # right: both sides are computed, the workers choose",
        "  if step(x).item() > 0.1:           # right: outside the program: waits for the value",
        "",
        "error.py:8:9: warning[M305]: print runs when 'step' is traced",
        '      print("[bold]large")',
        "      ^^^^^^^^^^^^^^^^^^^^",
        '  print("[bold]large")             # wrong: runs when the program is traced, not at every call',
        "  result = step(x); print(result)  # right: outside: waits for the value",
        "",
        "1 error, 1 warning in 1 file",
    ]
    assert not (files / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("clean.py",), 0),
        (("clean.py", "--strict"), 0),
        (("warning.py",), 0),
        (("warning.py", "--strict"), 1),
        (("clean.py", "warning.py", "error.py"), 1),
        ((".",), 1),
    ],
)
def test_the_exit_status(files: Path, monarchc: Run, arguments: tuple[str, ...], status: int) -> None:
    monarchc("check", *arguments, code=status)


def test_github_sees_the_findings_at_their_lines(files: Path, monarchc: Run) -> None:
    (files / "a,b:c.py").write_text(ERROR)
    result = monarchc("check", "a,b:c.py", "--format", "github", code=1)
    first, second = result.out.splitlines()
    assert first.startswith(
        "::error file=a%2Cb%3Ac.py,line=7,col=8,endColumn=23,title=M101::"
        "'step' cannot branch on a tensor's value%0Aif x.sum() > 100%257:"
    )
    assert second.startswith("::warning file=a%2Cb%3Ac.py,line=8,col=9,endColumn=29,title=M305::print runs when")


@pytest.mark.parametrize("option", [["--json"], ["--format", "json"]])
def test_findings_as_json(files: Path, monarchc: Run, option: list[str]) -> None:
    result = monarchc("check", "error.py", "clean.py", *option, code=1)
    data = json.loads(result.out)
    assert (data["files"], data["errors"], data["warnings"]) == (2, 1, 1)
    first = data["findings"][0]
    assert {key: first[key] for key in ("level", "code", "file", "line", "column", "end")} == {
        "level": "error",
        "code": "M101",
        "file": "error.py",
        "line": 7,
        "column": 8,
        "end": 23,
    }
    assert first["message"] == "'step' cannot branch on a tensor's value" and "torch.where" in first["hint"]


def test_wrong_input_is_told_and_the_other_files_are_checked(files: Path, monarchc: Run) -> None:
    (files / "broken.py").write_text("def f(:\n    pass\n")
    result = monarchc("check", "broken.py", "none.py", "error.py", code=2)
    assert result.err.splitlines() == [
        "monarchc: error: broken.py:1:7: error: no Python: invalid syntax",
        "      def f(:",
        "            ^",
        "monarchc: error: cannot read none.py: No such file or directory",
    ]
    assert "M101" in result.out and "Traceback" not in result.out
    (files / "empty").mkdir()
    result = monarchc("check", "empty", code=2)
    assert result.err == "monarchc: error: no Python file in empty\n"
    monarchc("check", code=2)


def test_control_characters_of_a_file_do_not_reach_the_terminal(files: Path, monarchc: Run) -> None:
    (files / "hostile.py").write_text(
        "import monarch\n@monarch.program\ndef f(x: 'f32[4]'):\n    x.item(); '\x1b[2J'\n"
    )
    result = monarchc("check", "hostile.py", code=1)
    assert "\x1b" not in result.out and "�[2J" in result.out
