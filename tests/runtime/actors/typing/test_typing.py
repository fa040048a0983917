"""Calls of endpoints are typed: pyright accepts what is right, knows the types of replies, and finds what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


@pytest.fixture(scope="module")
def diagnostics() -> dict[str, list[dict[str, Any]]]:
    """What pyright says of each file."""
    files = ["good.py", "bad.py"]
    # Pyright takes its settings from pyproject.toml, and a path that is excluded there only when it is named.
    command = [sys.executable, "-m", "pyright", "--outputjson", *(str(HERE / file) for file in files)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    found: dict[str, list[dict[str, Any]]] = {file: [] for file in files}
    for diagnostic in json.loads(result.stdout)["generalDiagnostics"]:
        found[Path(diagnostic["file"]).name].append(diagnostic)
    return found


def comments(file: str) -> dict[int, str]:
    """The comment at the end of each line that has one, by line number from 1."""
    lines = enumerate((HERE / file).read_text().splitlines(), start=1)
    return {number: match[1] for number, line in lines if (match := re.search(r"\S  # (.*)$", line))}


def test_what_is_right_has_these_types(diagnostics: dict[str, list[dict[str, Any]]]) -> None:
    wrong = [diagnostic for diagnostic in diagnostics["good.py"] if diagnostic["severity"] != "information"]
    assert wrong == []
    revealed = {
        diagnostic["range"]["start"]["line"] + 1: re.sub(
            r'^Type of .* is "(.*)"$', r"\1", diagnostic["message"], flags=re.S
        )
        for diagnostic in diagnostics["good.py"]
    }
    assert revealed == comments("good.py")


def test_what_is_wrong_is_found(diagnostics: dict[str, list[dict[str, Any]]]) -> None:
    rules: dict[int, list[str]] = {}
    for diagnostic in diagnostics["bad.py"]:
        rules.setdefault(diagnostic["range"]["start"]["line"] + 1, []).append(diagnostic["rule"])
    assert {line: ", ".join(sorted(found)) for line, found in rules.items()} == comments("bad.py")
