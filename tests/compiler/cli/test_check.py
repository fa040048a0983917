"""`monarchc check`: its formats and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from monarch.compiler.cli import main; main()", "check", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "error.py").write_text(ERROR)
    (tmp_path / "warning.py").write_text(WARNING)
    (tmp_path / "clean.py").write_text(CLEAN)
    return tmp_path


def test_findings_as_text_and_nothing_is_run(files: Path) -> None:
    result = check(files, "error.py")
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.splitlines() == [
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
def test_the_exit_status(files: Path, arguments: tuple[str, ...], status: int) -> None:
    assert check(files, *arguments).returncode == status


def test_github_sees_the_findings_at_their_lines(files: Path) -> None:
    (files / "a,b:c.py").write_text(ERROR)
    result = check(files, "a,b:c.py", "--format", "github")
    first, second = result.stdout.splitlines()
    assert first.startswith(
        "::error file=a%2Cb%3Ac.py,line=7,col=8,endColumn=23,title=M101::"
        "'step' cannot branch on a tensor's value%0Aif x.sum() > 100%257:"
    )
    assert second.startswith("::warning file=a%2Cb%3Ac.py,line=8,col=9,endColumn=29,title=M305::print runs when")
    assert result.returncode == 1


@pytest.mark.parametrize("option", [["--json"], ["--format", "json"]])
def test_findings_as_json(files: Path, option: list[str]) -> None:
    result = check(files, "error.py", "clean.py", *option)
    data = json.loads(result.stdout)
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


def test_wrong_input_is_told_and_the_other_files_are_checked(files: Path) -> None:
    (files / "broken.py").write_text("def f(:\n    pass\n")
    result = check(files, "broken.py", "none.py", "error.py")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "monarchc: error: broken.py:1:7: error: no Python: invalid syntax",
        "      def f(:",
        "            ^",
        "monarchc: error: cannot read none.py: No such file or directory",
    ]
    assert "M101" in result.stdout and "Traceback" not in result.stdout
    (files / "empty").mkdir()
    result = check(files, "empty")
    assert (result.returncode, result.stderr) == (2, "monarchc: error: no Python file in empty\n")
    assert check(files).returncode == 2


def test_control_characters_of_a_file_do_not_reach_the_terminal(files: Path) -> None:
    (files / "hostile.py").write_text(
        "import monarch\n@monarch.program\ndef f(x: 'f32[4]'):\n    x.item(); '\x1b[2J'\n"
    )
    result = check(files, "hostile.py")
    assert result.returncode == 1 and "\x1b" not in result.stdout and "�[2J" in result.stdout
