"""The examples as a user's editor sees them: mypy, pyright and ruff with their own settings, away from ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sample import is_full

ROOT = Path(__file__).parents[2]

RESULTS = """
from typing import Annotated, assert_type
import monarch
import torch
import torch.nn.functional as F

mesh = monarch.Mesh(data=2)
x = monarch.distribute(torch.randn(4, 4), mesh, "[@data, -]")
assert_type((x @ x.T).sum(), monarch.DistributedTensor)
Rows = Annotated[torch.Tensor, "f32[4@data, 4]"]

@monarch.program
def step(x: Rows) -> torch.Tensor:
    return F.relu(x)

@monarch.program(mesh=mesh)
def both(x: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x + 1

y = step(x)
print(y.full_tensor(), y.sharding, y.to(mesh))
first, second = both(x)
print(first.full_tensor() + second.full_tensor(), step.trace(x).graph)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the examples, without our settings."""
    made = tmp_path_factory.mktemp("user")
    for file in (ROOT / "examples").glob("*.py"):
        shutil.copy(file, made)
    (made / "results.py").write_text(RESULTS)
    (made / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / ".src")]}))
    return made


def check(folder: Path, *command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_mypy(folder: Path) -> None:
    # The types that it needs of our modules and PyTorch's take a minute to find, and are kept for the next time.
    check(folder, "mypy", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}", ".")


@pytest.mark.timeout(600)
def test_pyright(folder: Path) -> None:
    ready = subprocess.run([sys.executable, "-m", "pyright", "--version"], capture_output=True, text=True)
    if ready.returncode != 0:
        pytest.skip("pyright fetches its checker when it is first run, and cannot")
    check(folder, "pyright", "--pythonpath", sys.executable, *([] if is_full() else ["results.py"]))


def test_ruff(folder: Path) -> None:
    check(folder, "ruff", "check", "--isolated", "--exclude=results.py")
