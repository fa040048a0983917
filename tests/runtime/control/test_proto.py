"""What is written from monarch.proto is what monarch.proto says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_generated_files_are_current(tmp_path: Path) -> None:
    subprocess.run([ROOT / ".ci" / "proto", sys.executable, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    for name in ("monarch_pb2.py", "monarch_pb2.pyi"):
        written = (tmp_path / "monarch" / "runtime" / "control" / name).read_text()
        assert written == (ROOT / "runtime" / "control" / name).read_text(), f"{name} is not current: make proto"
