"""A plan's file answers `--by`, `--why` and `--text` without torch, and says what the whole plan says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from monarch.compiler.cli import look
from monarch.compiler.cli.app import app
from monarch.compiler.cli.options import BY, SORTS
from monarch.compiler.errors import MonarchError, PlanError
from monarch.compiler.layout import ITEM_SIZES
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.file import load_plan, save_plan
from monarch.compiler.plan.look import look_at
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.types import DTYPES
from tests.compiler.test_depth import training_step


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a training step, with generated kernels."""
    path = tmp_path_factory.mktemp("plans") / "step.mplan"
    save_plan(compile_graph(training_step(["whole"] * 2), CompileOptions(kernels="all"), report=True), path)
    return path


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def both(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[str, str]:
    """What is printed of a file that is looked at, and of the plan that it holds."""
    seen = printed(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(look, "look_at", lambda path: None)
        return seen, printed(*arguments)


@pytest.mark.parametrize("by", BY)
def test_costs_are_those_of_the_whole_plan(by: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sort in SORTS:
        seen, whole = both(monkeypatch, str(file), "--by", by, "--sort", sort)
        assert seen == whole and len(seen.splitlines()) > 3
    seen, whole = both(monkeypatch, str(file), "--by", by, "--json")
    assert json.loads(seen) == json.loads(whole)


def test_reasons_are_those_of_the_whole_plan(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = load_plan(file).report
    assert report is not None and any(value.op == "kernel" for value in report.values)
    for value in report.values[::7]:
        seen, whole = both(monkeypatch, str(file), "--why", value.name)
        assert seen == whole
    kernel = next(value.name for value in report.values if value.op == "kernel")
    assert "kernel" in both(monkeypatch, str(file), "--why", kernel)[0]
    seen, whole = both(monkeypatch, str(file), "--why", kernel, "--by", "op", "--text", "--json")
    assert json.loads(seen) == json.loads(whole)


def test_torch_is_not_loaded(file: Path) -> None:
    code = f"""
import sys
from monarch.compiler.cli.look import inspect

given = dict(plan={str(file)!r}, sort=None, as_json=False)
inspect(**given, by={list(BY)!r}, why={load_plan(file).report.values[-1].name!r}, text=True, memory=False, html=None)
assert "torch" not in sys.modules and "numpy" not in sys.modules, "loaded"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "by line" in result.stdout and "graph @step" in result.stdout


def test_names_that_are_not_there_are_refused_alike(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for there in (look.look_at, lambda path: None):
        monkeypatch.setattr(look, "look_at", there)
        with pytest.raises(MonarchError) as error:
            look.inspect(**options(file, why="nothing_like_it"))
        found.append(str(error.value))
    assert found[0] == found[1] and "has no value" in found[0]


def options(file: Path, **given: Any) -> dict[str, Any]:
    names = "by sort kernels comms memory survives hosts part worker why html trace against dot text after emit kernel"
    names += " mesh target arg first_call memory_limit"
    return {"plan": str(file), "as_json": False, **dict.fromkeys(names.split()), **given}


def test_damaged_files_are_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    for name, damaged in {"short": data[:-5], "edited": data[:-5] + b"aaaaa", "none": b"PK" + data}.items():
        path = tmp_path / f"{name}.mplan"
        path.write_bytes(damaged)
        with pytest.raises(PlanError) as seen:
            look_at(path)
        with pytest.raises(PlanError) as whole:
            load_plan(path)
        assert str(seen.value) == str(whole.value)


def test_what_a_file_says_of_types_is_checked(file: Path) -> None:
    plan = load_plan(file)
    seen = look_at(file)
    assert seen is not None and seen.report is not None and plan.report is not None
    for ours, theirs in zip(seen.report.values, plan.report.values, strict=True):
        assert [str(each) for each in ours.types] == [str(each) for each in theirs.types]
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_SIZES
    assert re.fullmatch("[0-9a-f]{64}", seen.hash) and seen.hash == plan.hash
