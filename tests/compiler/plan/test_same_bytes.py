"""A program has one plan: the same bytes from whichever process compiles it."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

from monarch.compiler.plan.file import load_plan
from tests.sample import is_full

ROOT = Path(__file__).parents[3]


def test_every_process_compiles_the_same_bytes(tmp_path: Path) -> None:
    """Strings hash differently in each of these, and what hashes by its address lies elsewhere."""
    folders = [tmp_path / seed for seed in ("1", "2")]
    running = []
    for folder in folders:
        folder.mkdir()
        command = [sys.executable, "-m", "tests.compiler.plan.every_way", str(folder)]
        env = {**os.environ, "PYTHONHASHSEED": folder.name, "MONARCH_VERIFY": "0"}  # other tests verify such plans
        running.append(subprocess.Popen(command, cwd=ROOT, env=env))
    assert [process.wait() for process in running] == [0, 0]

    one, other = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert len(one) == (5 if is_full() else 2) and one.keys() == other.keys()
    for name in one:
        assert one[name] == other[name], f"{name}\n{_differences(*(folder / name for folder in folders))}"


def _differences(one: Path, other: Path) -> str:
    a, b = (load_plan(path).graph.splitlines() for path in (one, other))
    return "\n".join(difflib.unified_diff(a, b, lineterm="", n=1)) or "the graphs are the same"
