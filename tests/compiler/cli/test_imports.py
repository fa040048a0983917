"""`--import`: ops of the user's own, for commands that read plans without the program that they came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import python
from tests.compiler.cli.conftest import Run

ROOT = Path(__file__).parents[3]

OPS = """\
import torch

import monarch

library = torch.library.Library("ownops", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
library.impl("twice", torch.empty_like, "Meta")
monarch.sharding_rule("ownops.twice", "... -> ...")
"""

PROGRAM = """\
import own_ops
import torch

import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2)


@monarch.program(mesh=mesh)
def step(x: "f32[8@data]"):
    return torch.ops.ownops.twice(x)
"""


def monarchc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: an op that is registered stays."""
    code = f"import sys; sys.path[:1] = [{str(ROOT / '.src')!r}]; from monarch.compiler.cli import main; main()"
    return python.run("-c", code, *arguments, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan that calls such an op, and the module that registers it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_ops.py").write_text(OPS)
    (folder / "program.py").write_text(PROGRAM)
    result = monarchc(folder, "compile", "program.py:step", "-o", "step.mplan")
    assert result.returncode == 0, result.stderr
    return folder


NEEDS_OPS = [["run", "step.mplan", "--fill", "zeros"], ["inspect", "step.mplan", "--html", "page.html"]]


@pytest.mark.parametrize("command", NEEDS_OPS, ids=lambda command: command[0])
def test_without_it_a_plan_that_calls_such_an_op_is_refused(compiled: Path, command: list[str]) -> None:
    result = monarchc(compiled, *command)
    assert result.returncode == 2
    assert "Import what registers the ops of 'ownops' first" in result.stderr
    assert "--import" in result.stderr


@pytest.mark.parametrize(("name", "command"), [("own_ops", NEEDS_OPS[0]), ("own_ops.py", NEEDS_OPS[1])])
def test_with_it_the_plan_opens(compiled: Path, name: str, command: list[str]) -> None:
    result = monarchc(compiled, "--import", name, *command)
    assert result.returncode == 0, result.stderr


def test_a_plan_is_looked_at_without_its_ops(compiled: Path) -> None:
    result = monarchc(compiled, "inspect", "step.mplan", "--by", "op")
    assert result.returncode == 0, result.stderr
    assert "ownops.twice" in result.stdout


def test_what_cannot_be_imported_is_told(folder: Path, monarchc: Run) -> None:
    assert "there is no module nowhere" in monarchc("--import", "nowhere", "inspect", "step.mplan", code=2).err
    assert "there is no file nowhere.py" in monarchc("--import", "nowhere.py", "inspect", "step.mplan", code=2).err
    (folder / "breaks.py").write_text("1 / 0\n")
    error = monarchc("--import", "breaks.py", "inspect", "step.mplan", code=2).err
    assert "breaks.py:1" in error and "ZeroDivisionError" in error
