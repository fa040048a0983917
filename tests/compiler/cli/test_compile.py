"""`monarchc compile`: users' files without workers."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from monarch.compiler.cli.options import TARGETS as COMPLETED
from monarch.compiler.plan import TARGETS
from monarch.compiler.plan.file import load_plan
from tests.compiler.cli.conftest import Run


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr("monarch.runtime.controller.executor.start_local", refuse)
    monkeypatch.setattr(os, "fork", refuse)


def test_a_training_step_without_a_worker(folder: Path, monarchc: Run, no_fork: None) -> None:
    result = monarchc("compile", "train.py:train_step", "-o", "step.mplan")
    assert result.out.startswith("train_step on mesh<data=2>: 2 workers, for cpu\n")
    assert re.search(r"^  data +reduce_scatter +\d", result.out, re.MULTILINE)
    assert "wrote step.mplan" in result.out
    assert result.err == "loading\n"  # what the user's file prints
    plan = load_plan("step.mplan")
    assert plan.report is not None and plan.traced.startswith("graph @train_step")


def test_the_plan_is_that_of_the_calls_that_follow_the_first(folder: Path, monarchc: Run) -> None:
    monarchc("compile", "train.py:train_step", "-o", "later.mplan")
    monarchc("compile", "train.py:train_step", "-o", "first.mplan", "--first-call")
    later, first = load_plan("later.mplan"), load_plan("first.mplan")
    moments = "adamw.exp_avg[0.weight]"
    assert moments in {spec.label for spec in later.inputs}
    assert moments not in {spec.label for spec in first.inputs}
    assert moments in {spec.label for spec in first.outputs}


def test_mesh_gives_the_sizes(folder: Path, monarchc: Run) -> None:
    shown = json.loads(monarchc("compile", "mlp.py", "--mesh", "data=4", "-o", "a.mplan", "--json").out)
    assert (shown["mesh"], shown["workers"]) == ({"data": 4, "model": 2}, 8)
    assert shown["file_bytes"] == Path("a.mplan").stat().st_size
    assert shown["collectives"]["model"]["all_reduce"]["count"] == 1
    assert "partition-by-data" in shown["seconds"]


@pytest.mark.parametrize("mesh", ["Mesh(procs=Elsewhere())", "Mesh(data=2, hosts=Elsewhere())"])
def test_no_worker_starts_in_processes_of_actors_or_on_hosts(mesh: str, folder: Path, monarchc: Run) -> None:
    Path("elsewhere.py").write_text(ELSEWHERE.replace("MESH", mesh))
    assert monarchc("compile", "elsewhere.py").out.startswith("step on mesh<data=2>: 2 workers")
    assert monarchc("compile", "elsewhere.py", "--mesh", "data=4").out.startswith("step on mesh<data=4>: 4 workers")


ELSEWHERE = """
import torch, monarch
from monarch.distributed import Mesh

class Elsewhere:
    sizes = {"data": 2}

    def start(self, mesh):
        raise AssertionError("workers are started")

weight = monarch.distribute(torch.ones(4), MESH)

@monarch.program
def step(x: "f32[4@data]"):
    return x + weight
"""


def test_a_plan_for_a_gpu_needs_none(folder: Path, monarchc: Run) -> None:
    monarchc("compile", "mlp.py", "--target", "cuda:90", "-o", "a.mplan")
    assert load_plan("a.mplan").target == "cuda:90"
    assert "for cuda:90" in monarchc("inspect", "a.mplan").out
    error = monarchc("run", "a.mplan", "--fill", "zeros", code=2).err
    assert "the plan is for cuda:90, and this machine has no GPU" in error


def test_the_shell_completes_the_targets_there_are() -> None:
    assert set(COMPLETED) == set(TARGETS)


@pytest.mark.parametrize(
    ("path", "name"),
    [("trainer.step", "step"), ("make_step()", "inner"), ("Trainer().step", "step"), ("evaluate", "evaluate")],
)
def test_ways_to_name_a_program(path: str, name: str, folder: Path, monarchc: Run) -> None:
    assert monarchc("compile", f"train.py:{path}").out.startswith(f"{name} on mesh<data=2>")
    assert load_plan(f"{name}.mplan").name == name


def test_arguments_come_from_the_command_the_file_and_the_annotations(folder: Path, monarchc: Run) -> None:
    monarchc("compile", "train.py:evaluate", "-o", "a.mplan")
    (x,) = (spec for spec in load_plan("a.mplan").inputs if spec.kind == "input")
    assert str(x.type) == "f32[4, 16]"
    arguments = ["--arg", "x=f32[32@data, 16]", "--arg", "scale=0.5", "--arg", "causal=true"]
    monarchc("compile", "train.py:evaluate", "-o", "b.mplan", *arguments)
    (x,) = (spec for spec in load_plan("b.mplan").inputs if spec.kind == "input")
    assert str(x.type) == "f32[32@data, 16]"


def test_passes_are_shown_when_asked_for(folder: Path, monarchc: Run) -> None:
    lines = monarchc("compile", "mlp.py", "-v").err.splitlines()
    names = ["simplify-views", "decompose", "simplify-lookups", "partition-by-data", "partition-by-model"]
    assert [line.split()[0] for line in lines][:5] == names
    assert all(re.search(r"\d ops$", line) for line in lines)


def test_users_modules_do_not_take_the_place_of_libraries(folder: Path, monarchc: Run) -> None:
    json_ = sys.modules["json"]
    (folder / "json.py").write_text((folder / "mlp.py").read_text())
    monarchc("compile", "json.py")
    assert sys.modules["json"] is json_


def test_modules_of_a_package_import_relatively(folder: Path, monarchc: Run) -> None:
    (folder / "package").mkdir()
    (folder / "package/__init__.py").write_text("")
    (folder / "package/sizes.py").write_text("FACTOR = 3\n")
    content = "from .sizes import FACTOR\nimport sizes\nassert sizes.FACTOR == FACTOR\n"
    (folder / "package/inner.py").write_text(content + (folder / "mlp.py").read_text())
    monarchc("compile", "package/inner.py", "-o", "inner.mplan")


def test_a_program_finds_the_only_mesh_of_its_file(folder: Path, monarchc: Run) -> None:
    program = "import monarch\n{}\n@monarch.program\ndef f(x: 'f32[4@data, 8]'):\n    return x * 2\n"
    (folder / "one.py").write_text(program.format("mesh = monarch.Mesh(data=2)"))
    assert "f on mesh<data=2>" in monarchc("compile", "one.py").out
    (folder / "two.py").write_text(program.format("a, b = monarch.Mesh(data=2), monarch.Mesh(data=4)"))
    assert "f has no mesh" in monarchc("compile", "two.py", code=2).err


def test_a_plan_that_cannot_be_written(folder: Path, monarchc: Run) -> None:
    assert "cannot write no/such/a.mplan" in monarchc("compile", "mlp.py", "-o", "no/such/a.mplan", code=2).err


def test_a_memory_limit(folder: Path, monarchc: Run) -> None:
    free = json.loads(monarchc("compile", "train.py:train_step", "--json").out)
    assert "memory_limit" not in free
    limit = int(free["peak_bytes"] * 0.97)
    made = json.loads(monarchc("compile", "train.py:train_step", "--memory-limit", str(limit), "--json").out)
    assert made["peak_bytes"] <= limit == made["memory_limit"]
    assert made["recomputed"]["calls"] > 0 and made["recomputed"]["without"] > limit
    shown = monarchc("inspect", "train_step.mplan", "--memory").out
    assert "under a limit of" in shown and "\ncomputed again, not kept: " in shown
    assert "_again" in monarchc("inspect", "train_step.mplan", "--after", "rematerialize").out
    assert "recomputed: saves" in monarchc("inspect", "train_step.mplan", "--text").out

    wrong = monarchc("compile", "train.py:train_step", "--memory-limit", "plenty", code=2)
    assert "--memory-limit is 'plenty', not a number of bytes" in wrong.err
    wrong = monarchc("compile", "train.py:train_step", "--memory-limit", "1KiB", code=2)
    assert "'train_step' does not fit in 1,024 bytes (1.0 KiB) a worker" in wrong.err
    wrong = monarchc("inspect", "train_step.mplan", "--memory-limit", "1GiB", code=2)
    assert "--memory-limit are for programs, and train_step.mplan is a plan" in wrong.err


def test_an_op_without_a_rule_is_refused_where_it_is_asked_for(folder: Path, monarchc: Run) -> None:
    text = "import monarch, torch\n\n@monarch.program\ndef step(x: 'f32[4@data, 4]'):\n    return x.renorm(2, 0, 1.0)\n"
    (folder / "counts.py").write_text(text)
    monarchc("compile", "counts.py", "--mesh", "data=2")
    strict = monarchc("compile", "counts.py", "--mesh", "data=2", "--strict", code=2)
    assert "counts.py:5:" in strict.err and "aten.renorm.default runs whole on every worker, with 64 B" in strict.err
    (folder / "counts.py").write_text(text.replace("program\n", "program(strict=True)\n"))
    monarchc("compile", "counts.py", "--mesh", "data=2", code=2)


def test_a_program_on_an_abstract_mesh_with_an_optimizer(folder: Path, monarchc: Run) -> None:
    text = (folder / "train.py").read_text().replace("Mesh(data=2)", "Mesh.abstract(data=4)")
    (folder / "abstract.py").write_text(text)
    result = monarchc("compile", "abstract.py:train_step", "-o", "step.mplan")
    assert "wrote step.mplan" in result.out
    inputs = {str(spec.label) for spec in load_plan(folder / "step.mplan").inputs}
    assert any("exp_avg" in label for label in inputs)  # that of the second call, which has the optimizer's state


MACHINE = 'target = "cpu"\nmemory = "{}"\n[[links]]\nwithin = "a host"\nbandwidth = 1e9\nlatency = 1e-6\n'


def test_whether_a_plan_fits_a_machine(folder: Path, monarchc: Run) -> None:
    def said(memory: str) -> list[str]:
        Path("mine.toml").write_text(MACHINE.format(memory))
        words: list[str] = json.loads(monarchc("compile", "deep.py", "--machine", "mine.toml", "--json").out)["verdict"]
        return words

    Path("deep.py").write_text("""\
import torch
from torch import nn

import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2)
model = monarch.module_to_mesh(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]), mesh)


@monarch.program
def step(x: "f32[4096@data, 8]"):
    loss = model(x).square().mean()
    loss.backward()
    return loss
""")
    (fits,) = said("1GiB")
    assert fits.startswith("fits mine: a worker holds ")
    most = json.loads(monarchc("compile", "deep.py", "--json").out)["peak_bytes"]
    tight = said(str(most * 3 // 4))
    assert tight[0].startswith("does not fit mine: ") and "forward" in tight[1]
    assert "makes it fit: " in tight[2] and "computed again" in tight[2]
    limit = re.search(r"--memory-limit (\d+)", tight[2])
    assert limit is not None
    done = json.loads(monarchc("compile", "deep.py", "--memory-limit", limit[1], "--json").out)
    assert done["peak_bytes"] <= int(limit[1])
    none = said("2KiB")
    assert "is not enough" in none[2] and "fully_shard" in none[3]


def test_a_machine_is_for_its_own_target(folder: Path, monarchc: Run) -> None:
    err = monarchc("compile", "mlp.py", "--machine", "h100-8", "--target", "cpu", code=2).err
    assert "h100-8 is for cuda:90" in err
