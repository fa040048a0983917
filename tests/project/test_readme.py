"""What the README shows is what one gets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from monarch.compiler import knobs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_prints_what_stands_below_it(tmp_path: Path) -> None:
    example, output = re.findall(r"^```(?:python)?\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "mlp.py").write_text(example)
    result = subprocess.run(
        [sys.executable, "mlp.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == output


def test_the_commands_are_make_targets() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ {4})make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_the_switches_are_those_that_are_read() -> None:
    read = set(re.findall(r"MONARCH_\w+", Path(knobs.__file__).read_text()))
    assert set(re.findall(r"MONARCH_[A-Z]+", README)) == read


def test_the_folders_exist() -> None:
    folders = re.findall(r"`([\w./]+/)`", README)
    assert len(folders) >= 7
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
