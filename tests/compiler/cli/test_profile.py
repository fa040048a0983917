"""`monarchc profile`: scripts, functions and plans, run on real workers, as a user sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarch.compiler.cli import main
from monarch.compiler.inspect.trace import load_trace
from monarch.compiler.plan import Plan
from tests.compiler.inspect.test_trace import check_format, check_nesting

SCRIPT = '''\
"""Two steps of a linear layer's training, on two workers."""
import sys

import torch

import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2)
layer = monarch.module_to_mesh(torch.nn.Linear(4, 4), mesh)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)


@monarch.program
def train_step(x: "f32[8@data, 4]"):
    optimizer.zero_grad()
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def steps(count=2):
    for _ in range(count):
        loss = train_step(torch.ones(8, 4))
    return loss.item()


if __name__ == "__main__":
    losses = steps(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    mesh.close()
    print("arguments", sys.argv[1:])
    if "fail" in sys.argv:
        raise ValueError("told to fail")
    if "leave" in sys.argv:
        sys.exit(3)
'''


@dataclass
class Said:
    status: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["monarchc", "profile", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return Said(int(left.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script's step, compiled."""
    monkeypatch.setattr(sys, "argv", ["monarchc", "compile", "train.py:train_step", "-o", "step.mplan"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    capsys.readouterr()
    return tmp_path / "step.mplan"


def test_a_script_runs_as_main_with_its_arguments(run: Run, tmp_path: Path) -> None:
    said = run("train.py", "-o", "out.json.gz", "--", "5", "--flag")
    assert said.status == 0, said.err
    assert "arguments ['5', '--flag']" in said.out
    assert "measured 5 steps on mesh<data=2>" in said.out
    for words in ("where the workers' time went", "train_step by value", "aten.addmm", "train.py:17", "data=1", "idle"):
        assert words in said.out
    assert "collectives: the longest first" in said.out and "mm_reduce_scatter" in said.out
    assert "critical path: of step" in said.out
    assert "skew: how long after the first worker" in said.out and "most often last" in said.out
    assert "wrote out.json.gz, " in said.out and "open it at https://ui.perfetto.dev" in said.out
    trace = load_trace(tmp_path / "out.json.gz")
    assert len({step.number for step in trace.steps}) == 5
    assert sys.argv[0] == "monarchc"


def test_the_file_is_one_that_viewers_read_with_the_plans_names(run: Run, tmp_path: Path) -> None:
    run("train.py")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    check_format(events)
    check_nesting(events)
    lines = {event["args"].get("line") for event in events if event.get("cat") == "compute"}
    assert {"train.py:17", "train.py:18", "train.py:19"} <= lines
    arrows = [event for event in events if event["ph"] == "s" and event["cat"] == "command"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(arrows) == len(steps) == 2 * 2
    controller = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0}
    assert {"trace train_step", "compile train_step", "load train_step", "run train_step"} <= controller


@pytest.mark.parametrize("by", ["op", "module", "line"])
def test_the_table_can_be_by_other_things(run: Run, by: str) -> None:
    said = run("train.py", "--by", by)
    assert f"train_step by {by}" in said.out
    assert {"op": "aten.addmm", "module": "(no module)", "line": "train.py:18"}[by] in said.out


def test_json_holds_everything(run: Run, tmp_path: Path) -> None:
    said = run("train.py:steps", "--json")
    assert said.status == 0, said.err
    ((found),) = json.loads(said.out)
    assert found["mesh"] == {"data": 2} and found["trace"] == "trace.json" and found["dropped"] == 0
    plan = found["plans"][0]
    assert plan["name"] == "train_step" and plan["failed"] == 0 and plan["held_bytes"] > 0
    assert len(plan["seconds"]) == plan["steps"] and all(seconds > 0 for seconds in plan["seconds"])
    ops = {value["op"]: value for value in plan["values"]}
    assert ops["reduce_scatter"]["sent_bytes"] > 0 and ops["reduce_scatter"]["estimated_seconds"] > 0
    assert ops["aten.addmm"]["runs"] == 2 * plan["steps"] and ops["aten.addmm"]["line"] == "train.py:17"
    assert {entry["name"] for entry in plan["critical_path"]} > {"addmm"}
    skew = {each["name"]: each for each in plan["skew"]}["mm_reduce_scatter"]
    assert skew["workers"] == [0, 1] and skew["last"] in (0, 1) and skew["seconds"] >= 0
    assert 1 <= skew["times"] <= skew["runs"] == plan["steps"]
    for worker in found["workers"]:
        assert min(worker.values()) >= 0 and worker["compute"] > 0


def test_a_plan_runs_without_its_source(run: Run, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").unlink()
    said = run("step.mplan", "--steps", "4", "-o", "t.json")
    assert said.status == 0, said.err
    assert "measured 4 steps on mesh<data=2>" in said.out
    assert "monarchc inspect step.mplan --trace t.json --html page.html" in said.out
    trace = load_trace(tmp_path / "t.json")
    loaded = Plan.load(str(plan))
    assert [traced.hash for traced in trace.plans] == [loaded.hash]
    assert {len(step.spans) for step in trace.steps} == {len(loaded.instructions)}


def test_names_are_those_of_the_plan(run: Run, plan: Path) -> None:
    found: list[dict[str, Any]] = json.loads(run("step.mplan", "--json").out)
    report = Plan.load(str(plan)).report
    assert report is not None
    names = [value.name for value in report.values if value.instruction >= 0]
    assert [value["name"] for value in found[0]["plans"][0]["values"] if value["op"] != "commit"] == names


def test_a_script_that_fails_leaves_a_trace_and_its_error(run: Run, tmp_path: Path) -> None:
    said = run("train.py", "--", "3", "fail")
    assert said.status == 2
    assert "train.py:34: error: ValueError: told to fail, raised while running train.py" in said.err
    assert len({step.number for step in load_trace(tmp_path / "trace.json").steps}) == 3
    assert "measured 3 steps" in said.out


def test_a_script_that_exits_with_a_status_is_told(run: Run) -> None:
    said = run("train.py", "--", "2", "leave")
    assert said.status == 1 and "train.py exited with status 3" in said.err and "measured 2 steps" in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["missing.mplan"], "cannot read missing.mplan"),
        (["train.py:nothing"], "train.py has no function 'nothing'"),
        (["train.py", "--steps", "3"], "--steps, --inputs and --scalar are for plans"),
        (["train.py", "--by", "weight"], "--by 'weight'"),
        (["train.py", "-o", "no/folder/trace.json"], "there is no folder"),
        (["step.mplan", "--", "3"], "arguments are for scripts"),
        (["idle.py"], "idle.py ran nothing on a mesh"),
        (["broken.py"], "broken.py:1:5: error: running broken.py: invalid syntax"),
    ],
    ids=str,
)
def test_wrong_input_is_one_clear_error(run: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "idle.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("def (\n")
    found = run("--json", *arguments)
    assert found.status == 2
    assert said in found.err and "Traceback" not in found.err
    printed = found.out.removeprefix("1\n")
    assert printed == "" or json.loads(printed), "no list of nothing"
