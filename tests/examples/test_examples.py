"""Each example runs as a user would run it, with short settings, and prints what it promises."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from monarch.compiler.inspect.trace import load_trace
from monarch.compiler.plan import Plan
from tests import python

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(example: str, *arguments: str, cwd: Path) -> str:
    result = python.run(EXAMPLES / example, *arguments, cwd=cwd, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r"run\(\s*\"(\w+\.py)\"", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_mesh_basics(tmp_path: Path) -> None:
    lines = run("mesh_basics.py", cwd=tmp_path).splitlines()
    assert lines == ["8", "torch.Size([1024, 1024]) torch.Size([1024, 1024])"]


def test_two_stages(tmp_path: Path) -> None:
    lines = run("two_stages.py", cwd=tmp_path).splitlines()
    losses = [float(found.group(1)) for line in lines if (found := re.search(r"loss (\S+) on Mesh\(data=2", line))]
    assert len(losses) == 3 and losses[2] < losses[0] / 2
    forth, back = ("f32[32@data, 64] from mesh 0 to mesh 1", "f32[32@data, 64] from mesh 1 to mesh 0")
    assert [line.partition(",  two")[0][: len(forth)] for line in lines[3:]] == [forth, back, forth, back]


@pytest.mark.full
def test_pipeline_gpt(tmp_path: Path) -> None:
    lines = run("pipeline_gpt.py", "2", cwd=tmp_path).splitlines()
    losses = [re.search(r"loss (\S+?)(,|$)", line) for line in lines]
    assert [line.split()[0] for line in lines] == ["whole", "gpipe", "1f1b", "interleaved", "zero-bubble"]
    assert len({found and found.group(1) for found in losses}) == 1 and "14.3% bubble" in lines[-1]


def test_unet_stages(tmp_path: Path) -> None:
    lines = run("unet_stages.py", cwd=tmp_path).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines[:2]]
    assert losses[1] < losses[0]
    assert "'pipe0 -> pipe2': {'count': 4" in lines[2] and lines[3].startswith("group 0: F0 F1 F2")


@pytest.mark.full
def test_eager_training_lowers_the_loss(tmp_path: Path) -> None:
    losses = [float(text) for text in re.findall(r"loss (\S+)", run("eager_training.py", cwd=tmp_path))]
    assert len(losses) == 5
    assert losses[0] == pytest.approx(math.log(4), abs=0.5)
    assert losses[-1] < losses[0] / 2


@pytest.mark.full
def test_finetune_lora(tmp_path: Path) -> None:
    lines = run("finetune_lora.py", "21", cwd=tmp_path).splitlines()
    assert re.fullmatch(r"[\d,]+ of [\d,]+ parameters are trained", lines[0])
    first, last = (float(line.rpartition(" ")[2]) for line in lines if line.startswith("step"))
    assert last < first - 0.2
    assert lines[-1] == "adapter.pt holds 28 tensors" and (tmp_path / "adapter.pt").exists()


@pytest.mark.full
def test_generate(tmp_path: Path) -> None:
    lines = run("generate.py", "--steps", "21", "--tokens", "8", cwd=tmp_path).splitlines()
    first, last = (float(line.rpartition(" ")[2]) for line in lines if line.startswith("step"))
    assert last < first - 1
    assert [line.partition(" goes on: ")[0] for line in lines[-3:]] == ["'def forward(self,'", "'import'", "'return'"]


@pytest.mark.full
def test_compiled_training_lowers_the_loss(tmp_path: Path) -> None:
    output = run("compiled_training.py", cwd=tmp_path)
    first, last = map(float, re.findall(r"(\d+\.\d+)", output))
    assert first == pytest.approx(math.log(256), abs=0.2)
    assert last < first - 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["respawn", "shrink", "own"])
def test_heal(tmp_path: Path, policy: str) -> None:
    lines = run("heal.py", "16", "--policy", policy, cwd=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("step")] == ["step 5", "step 15"]
    sizes = [int(line.split()[-2]) for line in lines if line.startswith("goes on")]
    assert sizes == ([4, 4] if policy == "respawn" else [3, 3])
    if policy == "respawn":
        assert lines[0] == lines[-2] and lines[-1] == "the same bits: True"
    else:
        assert lines[-1] == "close: True"


def test_resume(tmp_path: Path) -> None:
    losses = re.findall(r"(\d\.\d{5})$", run("resume.py", cwd=tmp_path), re.MULTILINE)
    assert len(losses) == 2 and float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-4)


def test_print_graphs(tmp_path: Path) -> None:
    output = run("print_graphs.py", "step.mplan", cwd=tmp_path)
    before, after = output.split("graph @train_step on mesh<data=2, model=2>")[1:]
    assert 'state "0.up.weight"' in before and "f32[128@model, 32]" in before
    assert "all_reduce" not in before and "all_reduce" in after
    plan = Plan.load(str(tmp_path / "step.mplan"))
    assert (plan.name, str(plan.mesh)) == ("train_step", "mesh<data=2, model=2>")


def test_inspecting(tmp_path: Path) -> None:
    output = run("inspecting.py", "page.html", cwd=tmp_path)
    assert "traced: 39 ops" in output
    assert "train_step on mesh<data=8, model=4>: 32 workers, for cpu" in output
    assert re.search(r"most bytes: \w+, [\d,]+ a worker, over data: .* needs it replicated on 'data'", output)
    assert "for the line: loss = F.cross_entropy(model(x), labels)" in output
    assert "the program gives state '0.up.weight' the layout" in output  # the chain of causes
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "train_step" in page


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    options = ["--steps", "6", "--layers", "1", "--width", "32", "--sample", "20"]
    return run("train_gpt.py", *options, cwd=folder), folder


@pytest.mark.full
def test_the_demo_on_a_ray_cluster_has_plain_pytorchs_losses(tmp_path: Path) -> None:
    output = run("train_on_ray.py", "--steps", "4", "--layers", "1", "--width", "32", cwd=tmp_path)
    assert re.search(
        r"Training on Mesh\(data=2, model=2\), on Ray's nodes 127\.0\.0\.\d:\d+,\s+127\.0\.0\.\d:\d+", output
    )
    rows = re.findall(r"│ +(\d+) │ +(\S+) │ +(\S+) │ +(\S+) │", output)
    assert [int(step) for step, *_ in rows] == list(range(4))
    assert all(float(ours) == pytest.approx(float(plain), abs=5e-6) for _, ours, plain, _ in rows)


def test_the_demos_losses_are_plain_pytorchs(demo: tuple[str, Path]) -> None:
    rows = re.findall(r"│ +(\d+) │ +(\S+) │ +(\S+) │ +(\S+) │", demo[0])
    assert [int(step) for step, *_ in rows] == list(range(6))
    for _, ours, plain, difference in rows:
        assert float(ours) == pytest.approx(float(plain), abs=5e-6)
        assert abs(float(difference)) <= 5e-6
    assert float(rows[-1][1]) < float(rows[0][1])


def test_the_demo_shows_its_progress_without_a_terminal(demo: tuple[str, Path]) -> None:
    steps = re.findall(r"step +(\d+)/6  loss (\d+\.\d+)", demo[0])
    assert [int(step) for step, _ in steps] == [1, 2, 3, 4, 5, 6] * 2  # ours, then plain PyTorch's
    assert "tokens/s" in demo[0]


def test_the_demo_prints_one_layers_graphs(demo: tuple[str, Path]) -> None:
    before, after = demo[0].split("graph @layer on mesh<data=2, model=2>")[1:]
    assert "all_reduce" not in before
    # Megatron's two a block: after attention's output layer, and after the MLP's.
    assert after.count("= all_reduce(") == 2


def test_the_demo_writes_its_plan_a_trace_of_it_and_its_page(demo: tuple[str, Path]) -> None:
    output, folder = demo
    for name in ("train_step.mplan", "train_step.trace.json", "train_step.html"):
        assert f"out/{name}" in output
    plan = Plan.load(str(folder / "out" / "train_step.mplan"))
    assert str(plan.mesh) == "mesh<data=2, model=2>"
    trace = load_trace(folder / "out" / "train_step.trace.json")
    assert [traced.hash for traced in trace.plans] == [plan.hash]
    assert {step.worker for step in trace.steps} == {0, 1, 2, 3}
    assert plan.hash in (folder / "out" / "train_step.html").read_text()


def test_the_demo_generates_text(demo: tuple[str, Path]) -> None:
    assert re.search(r"What the trained model writes.*\ndef ", demo[0])


def test_the_crawler_visits_each_page_once(tmp_path: Path) -> None:
    output = run("crawler.py", cwd=tmp_path)
    [(pages, links)] = re.findall(
        r"^(\d+) modules can be reached from pydoc, over (\d+) imports$", output, re.MULTILINE
    )
    read = [int(count) for count in re.findall(r"^crawler \d read (\d+)$", output, re.MULTILINE)]
    assert len(read) == 3 and sum(read) == int(pages) > 100 and int(links) > int(pages)


def test_streaming_parquet_goes_on_where_it_stopped(tmp_path: Path) -> None:
    stopped, after = run("stream_parquet.py", cwd=tmp_path).splitlines()
    assert re.fullmatch(r"stopped in epoch 1, after 1,500 of its rows: loss \d\.\d+", stopped)
    assert after == "after epoch 4: weight [1.995, 2.999]"


def test_a_fabric_loop_trains_on_a_mesh(tmp_path: Path) -> None:
    *epochs, weight = run("fabric.py", cwd=tmp_path).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in epochs]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert weight == "DistributedTensor [32, 16], sharded [@data, -]"


def test_a_marimo_notebook_shows_the_loss(tmp_path: Path) -> None:
    [(first, steps, last)] = re.findall(
        r"^loss (\S+), after (\d+) steps (\S+)$", run("live_loss.py", cwd=tmp_path), re.MULTILINE
    )
    assert int(steps) == 20 and float(last) < float(first) / 100


def test_the_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    path = os.pathsep.join([str(ROOT / ".src"), os.environ.get("PYTHONPATH", "")])
    client = NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PYTHONPATH": path, "IPYTHONDIR": str(tmp_path)})
    mesh, x, losses, page, _ = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert "<svg" in mesh[0].data["text/html"] and "<svg" in x[0].data["text/html"]
    found = re.fullmatch(r"loss (\S+), after 50 steps (\S+)\n", losses[0].text)
    assert found and float(found[2]) < float(found[1]) / 4
    assert page[0].data["text/html"].startswith("<iframe srcdoc=")


def test_the_replay_buffer_has_moves_of_all_players(tmp_path: Path) -> None:
    output = run("replay_buffer.py", cwd=tmp_path)
    made = re.findall(r"^player (\d) made (\d+) moves$", output, re.MULTILINE)
    assert [player for player, count in made if int(count)] == ["0", "1"]
    assert output.endswith("learnt in 400 batches: >>>>>>>>>\n")


def test_actors_feed_and_judge_a_model_in_its_workers_processes(tmp_path: Path) -> None:
    output = run("actors_and_programs.py", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", output)]
    right = [int(part) for part in re.findall(r"(\d+)%", output)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(right) == 6 and min(right[-2:]) > 90


def test_the_service_survives_the_death_of_its_workers(tmp_path: Path) -> None:
    lines = run("supervised_service.py", cwd=tmp_path).splitlines()
    assert lines[0].startswith("counted: [('the', 500), ") and lines[2].startswith("counted: [('the', 500), ")
    assert lines[3:] == ["workers kept: 1, new: 2", *["the service was told: worker: exit status -9"] * 2]


def test_the_parameter_server_learns_from_two_workers(tmp_path: Path) -> None:
    output = run("parameter_server.py", cwd=tmp_path)
    assert "weights and gradients went by shm\n" in output
    before, updates, after = map(int, re.findall(r"(\d+)(?:%| updates)", output))
    assert updates == 300 and before < 80 and after >= 95


@pytest.mark.full
def test_reinforcement_learning_raises_the_reward(tmp_path: Path) -> None:
    output = run("grpo.py", cwd=tmp_path)
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+)", output)]
    assert rewards[0] < 0.25 and rewards[-1] > 0.75
    assert re.search(r"^3 is followed by \d{6}$", output, re.MULTILINE)


@pytest.mark.parametrize("what", ["sum", "attention", "mixture"])
def test_per_worker_code_computes_what_plain_pytorch_does(what: str, tmp_path: Path) -> None:
    output = {
        "sum": lambda: run("ring_all_reduce.py", cwd=tmp_path),
        "attention": lambda: run("ring_attention.py", cwd=tmp_path),
        "mixture": lambda: run("expert_dispatch.py", cwd=tmp_path),
    }[what]()
    assert re.fullmatch(r"(both )?as (the )?dense \w+, gradients? included\n", output)


@pytest.mark.full
def test_long_context_trains_as_in_plain_pytorch(tmp_path: Path) -> None:
    steps = run("long_context.py", cwd=tmp_path).splitlines()
    pairs = [tuple(map(float, re.findall(r"\d\.\d+", line))) for line in steps]
    assert [ours for ours, _ in pairs] == pytest.approx([plain for _, plain in pairs], rel=1e-3)
    assert len(pairs) == 3


def test_generators_write_with_the_trainers_versions(tmp_path: Path) -> None:
    *lines, loss = run("trainer_and_generators.py", cwd=tmp_path).splitlines()
    found = [re.fullmatch(r"generator (\d), version (\d+): \[(.*)\]", line) for line in lines]
    assert [(int(each[1]), int(each[2])) for each in found if each] == [(g, v) for v in (4, 8, 12) for g in (0, 1)]
    assert [line.rpartition(": ")[2] for line in lines[-2:]] == ["[0, 3, 6, 9, 12, 15]", "[1, 4, 7, 10, 13, 0]"]
    assert float(loss.removeprefix("loss ")) < 1.5


@pytest.mark.full
def test_a_mixture_of_experts_trains_as_in_plain_pytorch(tmp_path: Path) -> None:
    layouts, *steps = run("experts.py", cwd=tmp_path).splitlines()
    assert layouts == "expert_parallel over expert=2: tokens come as [@(expert,data), -, -]"
    pairs = [tuple(map(float, re.findall(r"\d\.\d+", line))) for line in steps]
    assert [ours for ours, _ in pairs] == pytest.approx([plain for _, plain in pairs], rel=1e-3)
    assert len(pairs) == 3 and pairs[-1][0] < pairs[0][0] / 2


def test_editors_take_the_types_in_signatures() -> None:
    """A type that is a string alone is a name that is not defined."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(EXAMPLES)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
