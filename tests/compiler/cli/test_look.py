"""A plan's file answers all questions without torch, and says what the plan says that is read to be run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import monarch
from monarch.compiler.cli import inspect
from monarch.compiler.cli.app import app
from monarch.compiler.cli.options import BY, SORTS
from monarch.compiler.errors import PlanError
from monarch.compiler.layout import ITEM_SIZES, MeshSpec
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.file import load_plan, save_plan
from monarch.compiler.plan.look import look_at
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Plan
from monarch.compiler.types import DTYPES
from tests.compiler.test_depth import training_step


def of_two_meshes() -> Plan:
    root = monarch.Mesh.abstract(stage=2, data=2)
    first, second = root.slice(stage=0), root.slice(stage=1)
    up = monarch.module_to_mesh(torch.nn.Linear(8, 16), first)
    down = monarch.module_to_mesh(torch.nn.Linear(16, 8), second)
    table = torch.arange(8.0)

    @monarch.program
    def step(x: "f32[4@data, 8]"):  # type: ignore[no-untyped-def]
        loss = (down(up(x).relu().to(second)) + table).square().mean()
        loss.backward()
        return loss

    return step.compile(monarch.distribute(torch.ones(4, 8), first, "[@data, -]"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Plans of a training step with generated kernels, of the same for a GPU, and of a program of two meshes."""
    folder = tmp_path_factory.mktemp("plans")
    graph = training_step(["whole"] * 2)
    plans = {
        "cpu": compile_graph(graph, CompileOptions(kernels="all"), report=True),
        "gpu": compile_graph(graph, CompileOptions(kernels="all", target="cuda:90"), report=True),
        "parts": of_two_meshes(),
    }
    for name, plan in plans.items():
        save_plan(plan, folder / f"{name}.mplan")
    return {name: folder / f"{name}.mplan" for name in plans}


def questions(plan: Plan) -> list[list[str]]:
    """All that `monarchc inspect` can be asked of a plan, but what compiles: pages, sources and passes."""
    values = plan.report.values if plan.report is not None else ()
    found = [[], ["--json"], ["--kernels"], ["--comms"], ["--memory"], ["--text"], ["--why", "nothing_like_it"]]
    found += [["--by", by, "--sort", sort] for by, sort in zip(BY, cycle(SORTS))] + [
        ["--by", "line", "--by", "op", "--json"]
    ]
    found += [["--kernels", "--comms", "--memory", "--json"]]
    found += [["--why", value.name] for value in values[:: max(len(values) // 5, 1)]]
    alone = [["--survives"], ["--survives", "--hosts", "2", "--json"], ["--dot"], ["--worker", "data=1"]]
    part = ["--part", plan.parts[0].name] if plan.parts else []
    found += [[*each, *part] for each in (*alone, *([["--by", "line"], ["--memory"]] if part else []))]
    return found


def test_all_questions_are_answered_without_torch(files: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        ["inspect", str(files[name]), *each] for name in ("cpu", "parts") for each in questions(load_plan(files[name]))
    ]
    asked += [["inspect", str(files["gpu"]), *each] for each in ([], ["--kernels"], ["--by", "op"], ["--comms"])]
    asked += [["diff", str(files["cpu"]), str(files["parts"]), *how] for how in ([], ["--json"])]
    code = """
import json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "sympy"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, NoTorch())
from typer.testing import CliRunner
from monarch.compiler.cli.app import app

answers = []
for each in json.loads(sys.argv[1]):
    found = CliRunner().invoke(app, each)
    answers.append([found.exit_code, found.output or str(found.exception)])
print(json.dumps(answers))
"""
    result = subprocess.run([sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    monkeypatch.setattr(inspect, "seen_plan", load_plan)
    for arguments, (status, seen) in zip(asked, json.loads(result.stdout), strict=True):
        whole = CliRunner().invoke(app, arguments)
        assert (status, seen) == (whole.exit_code, whole.output or str(whole.exception)), arguments
        assert len(seen) > 20, arguments


def test_what_cuda_graphs_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.mplan"
    plan = compile_graph(training_step(["whole"]), CompileOptions(target="cuda:90", cuda_graphs=True), report=True)
    save_plan(plan, path)
    seen = CliRunner().invoke(app, ["inspect", str(path), "--memory", "--json"]).output
    monkeypatch.setattr(inspect, "seen_plan", load_plan)
    assert seen == CliRunner().invoke(app, ["inspect", str(path), "--memory", "--json"]).output
    assert json.loads(seen)["memory"]["kept_by_graphs"] > 0


def test_damaged_files_are_refused(files: Mapping[str, Path], tmp_path: Path) -> None:
    data = files["cpu"].read_bytes()
    for name, damaged in {"short": data[:-5], "edited": data[:-5] + b"aaaaa", "none": b"PK" + data}.items():
        path = tmp_path / f"{name}.mplan"
        path.write_bytes(damaged)
        with pytest.raises(PlanError) as seen:
            look_at(path)
        with pytest.raises(PlanError) as whole:
            load_plan(path)
        assert str(seen.value) == str(whole.value)


def test_types_read_alike(files: Mapping[str, Path]) -> None:
    for path in files.values():
        plan, seen = load_plan(path), look_at(path)
        assert seen.hash == plan.hash and len(plan.inputs) == len(seen.inputs)
        for ours, theirs in zip((*seen.inputs, *seen.outputs), (*plan.inputs, *plan.outputs), strict=True):
            assert (str(ours.type), ours.slot) == (str(theirs.type), theirs.slot)
            assert ours.type.local_shape(plan.mesh) == theirs.type.local_shape(plan.mesh)
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_SIZES


def test_constants_are_their_types(tmp_path: Path) -> None:
    constants = {name: torch.zeros(3, 2, dtype=dtype) for name, dtype in DTYPES.items()}
    plan = Plan("step", MeshSpec.of(data=2), (), (), (), len(constants), (), constants)
    plan = replace(plan, constant_slots={name: at for at, name in enumerate(constants)})
    save_plan(plan, tmp_path / "c.mplan")
    seen = look_at(tmp_path / "c.mplan").constants
    assert {name: f"{type_}" for name, type_ in seen.items()} == {name: f"{name}[3, 2]" for name in DTYPES}
