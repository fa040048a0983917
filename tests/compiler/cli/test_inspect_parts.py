"""`monarchc inspect` of a program of several meshes: what each runs, and what they send one another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monarch.compiler.errors import MonarchError
from monarch.compiler.graph import provenance
from monarch.compiler.inspect.inspection import Inspection
from monarch.compiler.inspect.page import page
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.file import load_plan
from monarch.compiler.plan.report import peak
from monarch.compiler.report import traced_graph
from tests.compiler.cli.conftest import Run

PROGRAM = """\
import torch
import monarch

root = monarch.Mesh.abstract(stage=2, data=2)
first, second = root.slice(stage=0), root.slice(stage=1)
up = monarch.module_to_mesh(torch.nn.Linear(8, 16), first)
down = monarch.module_to_mesh(torch.nn.Linear(16, 8), second)


@monarch.program
def step(x: "f32[4@data, 8]"):
    loss = down(up(x).relu().to(second)).square().mean()
    loss.backward()
    return loss
"""

MACHINE = 'target = "cpu"\nmemory = "{}"\n[[links]]\nwithin = "a host"\nbandwidth = 1e9\nlatency = 1e-6\n'


@pytest.fixture
def step(folder: Path, monarchc: Run) -> Plan:
    (folder / "stages.py").write_text(PROGRAM)
    monarchc("compile", "stages.py:step", "-o", "step.mplan")
    return load_plan("step.mplan")


def test_compiling_counts_what_is_sent(step: Plan, folder: Path, monarchc: Run) -> None:
    out = monarchc("compile", "stages.py:step", "-o", "step.mplan").out
    assert re.search(r"^  stage0 -> stage1 +1 +256 B$", out, re.MULTILINE)
    assert re.search(r"^  stage1 -> stage0 +1 +256 B$", out, re.MULTILINE)


def test_whether_each_mesh_fits_a_machine(folder: Path, monarchc: Run) -> None:
    def said(memory: int) -> list[str]:
        Path("mine.toml").write_text(MACHINE.format(memory))
        words: list[str] = json.loads(monarchc("compile", "deep.py", "--machine", "mine.toml", "--json").out)["verdict"]
        return words

    layers = "*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(6)], "
    deep = PROGRAM.replace("torch.nn.Linear(8, 16)", f"torch.nn.Sequential({layers}torch.nn.Linear(8, 16))")
    (folder / "deep.py").write_text(deep.replace("f32[4@data", "f32[4096@data"))
    (fits,) = said(1 << 30)
    assert fits.startswith("fits mine: a worker of stage0 holds ")
    most = max(peak(part.plan)[0] for part in load_plan("step.mplan").parts)
    tight = said(most * 4 // 5)
    assert tight[0].startswith("does not fit mine: a worker of stage0 holds ")
    calls = re.search(r"makes it fit: (\d+) ops computed again", tight[2])
    assert calls is not None and int(calls[1]) > 0

    monarchc("compile", "deep.py", "--memory-limit", str(most * 4 // 5))
    plan = load_plan("step.mplan")
    again = [part.plan.costs["recomputed"] for part in plan.parts]
    assert again[0]["calls"] > again[1]["calls"] == 0
    assert plan.costs["recomputed"]["calls"] == int(calls[1]) == again[0]["calls"]
    assert plan.costs["peak_bytes"] == max(part.plan.costs["peak_bytes"] for part in plan.parts) <= most * 4 // 5
    out = monarchc("inspect", "step.mplan", "--part", "stage0", "--memory").out
    assert f"computed again, not kept: {calls[1]} ops" in out
    assert "computed again, not kept" not in monarchc("inspect", "step.mplan", "--part", "stage1", "--memory").out


def test_the_overview_has_the_meshes_and_the_transfers(step: Plan, monarchc: Run) -> None:
    out = monarchc("inspect", "step.mplan").out
    assert "step on mesh<stage=2, data=2>: 4 workers, for cpu" in out
    assert re.search(r"^  input +x +f32\[4@data, 8\] +a worker holds \[2, 8\], on stage0$", out, re.MULTILINE)
    assert re.search(r"^  stage1  mesh<data=2>  2-3 +\d+", out, re.MULTILINE)
    assert re.search(r"stage0 -> stage1  f32\[4@data, 16\]  f32\[4@data, 16\]  256 B$", out, re.MULTILINE)
    found = json.loads(monarchc("inspect", "step.mplan", "--json").out)
    assert list(found["parts"]) == ["stage0", "stage1"] and found["parts"]["stage1"]["workers"] == [2, 3]
    assert [(each["from"], each["to"], each["bytes"]) for each in found["transfers"]] == [
        ("stage0", "stage1", 256),
        ("stage1", "stage0", 256),
    ]
    assert found["transfers"][0]["line"].startswith("stages.py:12")


@pytest.mark.sample(2)
@pytest.mark.parametrize("section", [["--comms"], ["--memory"], ["--kernels"], ["--by", "line"]])
def test_a_section_is_shown_of_each_mesh(step: Plan, monarchc: Run, section: list[str]) -> None:
    whole = monarchc("inspect", "step.mplan", *section).out
    assert [line for line in whole.splitlines() if line in ("stage0", "stage1")] == ["stage0", "stage1"]
    assert monarchc("inspect", "step.mplan", "--part", "stage1", *section).out.strip() in whole


def test_why_looks_on_every_mesh(step: Plan, monarchc: Run) -> None:
    out = monarchc("inspect", "step.mplan", "--why", "transfer").out
    assert out.startswith("stage1\n") and "it comes from another mesh, where it is [@data, -]" in out
    assert "no value" in monarchc("inspect", "step.mplan", "--why", "nothing", code=2).err


def test_the_text_is_that_of_all_meshes(step: Plan, monarchc: Run) -> None:
    out = monarchc("inspect", "step.mplan", "--text").out
    assert out.count("graph @") == 2 and "send(%relu, 0)" in out and "recv(0, [2, 16], f32)" in out
    traced = monarchc("inspect", "step.mplan", "--after", "trace").out
    assert "with stage0: mesh<data=2>, stage1: mesh<data=2> {" in traced
    assert monarchc("inspect", "step.mplan", "--after", "partition-by-mesh").out.count("partitioned<data>") == 2


def test_what_shows_one_mesh_asks_which(step: Plan, folder: Path, monarchc: Run) -> None:
    for option in (["--worker", "data=0"], ["--survives"], ["--dot"], ["--emit", "cpp"]):
        err = monarchc("inspect", "step.mplan", *option, code=2).err
        assert f"{option[0]} shows what one mesh runs, and 'step' is of stage0, stage1" in err
    err = monarchc("inspect", "step.mplan", "--html", "p.html", "--against", "step.mplan", code=2).err
    assert "--against shows what one mesh runs" in err
    monarchc("inspect", "step.mplan", "--part", "stage0", "--html", "p.html", "--against", "step.mplan", code=2)
    monarchc("inspect", "step.mplan", "--html", "p.html")
    assert (folder / "p.html").stat().st_size > 1000
    err = monarchc("inspect", "step.mplan", "--part", "stage2", code=2).err
    assert "has no part 'stage2'" in err and "its parts are stage0, stage1" in err


def test_an_inspection_says_what_each_mesh_runs(step: Plan) -> None:
    inspection = Inspection(step)
    assert "2 parts, 2 transfers" in repr(inspection) and "step.stage1 on mesh<data=2>" in repr(inspection)
    assert "stage1" in inspection._repr_html_()
    assert "it comes from another mesh" in str(inspection.explain("transfer"))
    with pytest.raises(MonarchError, match="a trace and another plan stand beside what one mesh runs"):
        page(step, against=step)


PIPELINE = """\
import torch
import monarch
from monarch.stdlib.pipeline import pipeline

layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 512), torch.nn.Linear(512, 8)]
pipe = pipeline(torch.nn.Sequential(*layers), monarch.Mesh.abstract(pipe=2), microbatches=4, split_at=["1"], layouts={})


@monarch.program
def step(x: "f32[1024, 8]"):
    return pipe.step(x, target=x, loss_fn=torch.nn.functional.mse_loss)
"""


def test_a_pipelines_timetable_and_what_each_stage_costs(folder: Path, monarchc: Run) -> None:
    (folder / "pipe.py").write_text(PIPELINE)
    monarchc("compile", "pipe.py:step", "-o", "pipe.mplan")
    out = monarchc("inspect", "pipe.mplan").out
    assert "group 0: F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --\n" in out
    found = json.loads(monarchc("inspect", "pipe.mplan", "--json").out)
    assert [(each["stage"], each["part"]) for each in found["stages"]] == [(0, "pipe0"), (1, "pipe1")]
    assert found["bubble"] > found["costs"]["schedule"]["bubble"] == pytest.approx(0.2)
    assert f"with these times the bubble is {found['bubble']:.1%}\n" in out
    assert re.search(r"^  stage 0 +pipe0 .* \d?\d%\n  stage 1 +pipe1 .* 100%$", out, re.MULTILINE)
    by_stage = monarchc("inspect", "pipe.mplan", "--by", "stage").out
    assert re.search(
        r"^pipe0\nby stage(.|\n)*^  stage 0 (.|\n)*^pipe1\nby stage(.|\n)*^  stage 1 ", by_stage, re.MULTILINE
    )


def test_passes_that_run_again_know_a_pipelines_microbatches(folder: Path, monarchc: Run) -> None:
    sharded = PIPELINE.replace("(pipe=2)", "(pipe=2, data=2)").replace("f32[1024, 8]", "f32[1024@data, 8]")
    (folder / "pipe.py").write_text(sharded)
    monarchc("compile", "pipe.py:step", "-o", "pipe.mplan")
    plan = load_plan("pipe.mplan")
    traced = traced_graph(plan)
    tasks = {(provenance(node).microbatch, provenance(node).stage) for node in traced.calls}
    assert {(microbatch, stage) for microbatch in range(4) for stage in range(2)} <= tasks
    assert compile_graph(traced, plan.options, report=True).graph == plan.graph
    assert "of microbatch 3, stage 1" in monarchc("inspect", "pipe.mplan", "--after", "trace").out
