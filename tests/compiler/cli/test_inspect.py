"""`monarchc inspect`: what its sections say of plans, and that what a file says cannot steer a terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import monarch
from monarch.compiler.cli.options import BY, SORTS
from monarch.compiler.cli.sections.comms import data as comms
from monarch.compiler.cli.sections.memory import curve, grouped
from monarch.compiler.inspect.costs import costs_by as by
from monarch.compiler.inspect.memory import WAITING, alive, alive_by_layer, layer_of
from monarch.compiler.inspect.values import report_of
from monarch.compiler.plan import Plan
from monarch.compiler.plan.file import load_plan, save_plan
from monarch.compiler.plan.report import held, peak
from monarch.compiler.text import parse_graph
from tests import python
from tests.compiler.cli.conftest import Run


@pytest.fixture
def mlp(folder: Path, monarchc: Run) -> Plan:
    monarchc("compile", "mlp.py")
    return load_plan("mlp.mplan")


@pytest.fixture
def training(folder: Path, monarchc: Run) -> Plan:
    monarchc("compile", "train.py:train_step", "-o", "step.mplan")
    return load_plan("step.mplan")


def test_the_overview(mlp: Plan, monarchc: Run) -> None:
    out = monarchc("inspect", "mlp.mplan").out
    assert out.startswith(f"mlp on mesh<data=2, model=2>: 4 workers, for cpu\nhash {mlp.hash}\n")
    assert "  input  x  f32[8@data, 64]  a worker holds [4, 64]\n" in out
    assert "state: 2 tensors, 64.0 KiB a worker\n  up    f32[64, 256@model]  a worker holds [64, 128]\n" in out
    assert re.search(r"^  model +all_reduce +1 +1 +1.0 KiB$", out, re.MULTILINE)


def test_a_program_is_inspected_like_its_plan(mlp: Plan, monarchc: Run) -> None:
    assert monarchc("inspect", "mlp.py:mlp", "--text").out == monarchc("inspect", "mlp.mplan", "--text").out


def test_ops_add_up_to_the_plan(training: Plan) -> None:
    calls = [i for i in training.instructions if i.op not in ("getitem", "commit")]
    for group in BY:
        assert sum(row["ops"] for row in by(training, group)) == len(calls)


def test_every_grouping_has_the_whole_step_and_the_dearest_first(training: Plan) -> None:
    values = [value for value in report_of(training).values if value.instruction >= 0]
    held = sum(size for _, size in alive(training))
    cost = {
        "time": lambda row: row["computing"] + row["communicating"],
        "bytes": lambda row: row["sent"],
        "memory": lambda row: row["peak_bytes"],
    }
    for group in BY:
        for sort in SORTS:
            rows = by(training, group, sort)
            assert len({row["name"] for row in rows}) == len(rows)
            assert sum(map(cost["time"], rows)) == pytest.approx(sum(value.seconds for value in values), rel=1e-6)
            assert sum(map(cost["bytes"], rows)) == sum(value.sent for value in values)
            assert sum(map(cost["memory"], rows)) == held
            costs = list(map(cost[sort], rows))
            assert costs == sorted(costs, reverse=True)


def test_modules_that_differ_in_numbers_alone_are_one_row(training: Plan, monarchc: Run) -> None:
    rows = {row["name"]: row for row in by(training, "module")}
    assert rows["*"]["modules"] == 3 and "(no module)" in rows  # "0", "1" and "2"
    assert re.search(r"^  \*  ×3 ", monarchc("inspect", "step.mplan", "--by", "module").out, re.MULTILINE)


def test_collectives_stand_by_mesh_dim(mlp: Plan) -> None:
    rows = {row["name"]: row for row in by(mlp, "mesh-dim")}
    assert set(rows) == {"model", "(within workers)"}
    assert rows["model"]["sent"] == 1024 and rows["model"]["computing"] == 0
    assert list(rows["model"]["collectives"]) == ["all_reduce over model"]


def test_collectives_are_sorted_by_bytes_and_those_of_the_costs(training: Plan, monarchc: Run) -> None:
    rows = comms(training)
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    by_op: dict[str, int] = {}
    for row in rows:
        by_op[row["op"]] = by_op.get(row["op"], 0) + row["bytes"]
    assert by_op == {op: counts["bytes"] for op, counts in training.costs["collectives"]["data"].items()}
    out = monarchc("inspect", "step.mplan", "--comms").out
    assert all(f"%{row['value']}" in out for row in rows)


def test_each_line_is_charged_what_it_caused(training: Plan, monarchc: Run) -> None:
    rows = {row.get("code", ""): row for row in by(training, "line")}
    loss = rows["loss = F.cross_entropy(model(x), labels)"]
    assert {name.split()[0] for name in loss["collectives"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert rows["loss.backward()"]["collectives"] == {}
    charged = sum(kept["bytes"] for row in rows.values() for kept in row["collectives"].values())
    assert charged == sum(row["bytes"] for row in comms(training))
    assert "optimizer.step()" in monarchc("inspect", "step.mplan", "--by", "line").out


def test_what_is_alive_at_the_peak_is_the_peak(training: Plan, monarchc: Run) -> None:
    together = sum(bytes_ for kinds in alive_by_layer(training).values() for bytes_ in kinds.values())
    assert together == peak(training)[0]
    assert {"weights", "optimizer state", "inputs"} <= {
        kind for row in alive_by_layer(training).values() for kind in row
    }
    out = monarchc("inspect", "step.mplan", "--memory").out
    assert "└forward" in out and "└backward" in out and "└update" in out


def test_what_is_alive_at_the_peak_of_a_first_call_is_the_peak(folder: Path, monarchc: Run) -> None:
    for arguments in (["--first-call"], ["--mesh", "data=4"], ["--mesh", "data=1"]):
        monarchc("compile", "train.py:train_step", "-o", "step.mplan", *arguments)
        plan = load_plan("step.mplan")
        together = sum(bytes_ for kinds in alive_by_layer(plan).values() for bytes_ in kinds.values())
        assert together == peak(plan)[0] and not any(WAITING in kinds for kinds in alive_by_layer(plan).values())


def test_layers_alike_are_one_row() -> None:
    same = {"forward": 8}
    layers = {"embedding": {"weights": 1}, **{f"blocks.{n}": same for n in range(5)}, "norm": {"weights": 1}}
    assert [name for name, _ in grouped(layers)] == ["embedding", "blocks.0 to 4, each", "norm"]
    assert [name for name, _ in grouped({"a": same, "b": same})] == ["a", "b"]


@pytest.mark.parametrize(
    ("module", "layer"), [("blocks.0.attn.q", "blocks.0"), ("0", "0"), ("net.0.1", "net.0"), ("head", "head"), ("", "")]
)
def test_the_layer_of_a_module(module: str, layer: str) -> None:
    assert layer_of(module) == layer


def test_the_curve_reaches_the_top_where_the_peak_is(training: Plan) -> None:
    lines = curve([0, 1, 2, 4, 8, 4], 8)
    assert lines[0] == "       8 B     █" + ""
    assert lines[-1].endswith(" ▁█" * 0 + "████") and len(lines) == 8
    assert curve([], 0) == []
    assert max(map(len, curve(held(training), peak(training)[0]))) <= 100


def test_what_one_worker_holds(mlp: Plan, monarchc: Run) -> None:
    out = monarchc("inspect", "mlp.mplan", "--worker", "data=1,model=1").out
    assert "inputs of worker 3: at data=1, model=1: 65.0 KiB\n" in out
    assert re.search(r"input +x +f32\[8@data, 64\] +\[4, 64\] +\[4:8, :\] +1.0 KiB", out)
    assert re.search(r"state +up +f32\[64, 256@model\] +\[64, 128\] +\[:, 128:256\] +32.0 KiB", out)
    whole = json.loads(monarchc("inspect", "mlp.mplan", "--worker", "model=1", "--json").out)["worker"]
    assert whole["rank"] == 1
    assert whole["inputs"][1]["ranges"] == [[0, 64], [128, 256]]


def test_why(mlp: Plan, monarchc: Run) -> None:
    out = monarchc("inspect", "mlp.mplan", "--why", "%mm_1_all_reduce").out
    assert out.startswith("%mm_1_all_reduce = all_reduce(")
    assert "the program gives state 'down' the layout [@model, -]" in out
    assert "chosen" in out and "bytes" in out
    found = json.loads(monarchc("inspect", "mlp.mplan", "--why", "mm_1_all_reduce", "--json").out)["why"]
    assert found["mesh_dims"] == ["model"] and found["moved"][0]["value_chains"]


def test_why_of_a_line_and_of_a_module(training: Plan, monarchc: Run) -> None:
    line = Path("train.py").read_text().splitlines().index("    loss = F.cross_entropy(model(x), labels)") + 1
    out = monarchc("inspect", "step.mplan", "--why", f"train.py:{line}").out
    assert out.startswith(f"train.py:{line}: loss = F.cross_entropy(model(x), labels)\n")
    there = [row for row in comms(training) if row["line"] == line]
    assert there and all(f"  %{row['value']}: {row['op']} over " in out for row in there)
    assert any(out.endswith(f"--why {row['value']}\n") for row in there)
    found = json.loads(monarchc("inspect", "step.mplan", "--why", f"train.py:{line}", "--json").out)["why"]
    assert found["sent"] == sum(row["bytes"] for row in there)
    module = monarchc("inspect", "step.mplan", "--why", "2").out
    assert module.startswith("2\n") and "ops: a worker computes for" in module


def test_why_of_a_line_without_collectives_names_its_values(mlp: Plan, monarchc: Run) -> None:
    line = Path("mlp.py").read_text().splitlines().index("    hidden = torch.relu(x @ up)") + 1
    out = monarchc("inspect", "mlp.mplan", "--why", f"mlp.py:{line}").out
    assert "no collective" in out and "\n  %relu : f32[8@data, 256@model]\n" in out


def test_what_there_is_no_why_of_names_what_there_is(training: Plan, monarchc: Run) -> None:
    line = Path("train.py").read_text().splitlines().index("    loss = F.cross_entropy(model(x), labels)") + 1
    err = monarchc("inspect", "step.mplan", "--why", f"train.py:{line - 1}", code=2).err
    assert f"no value, line or module 'train.py:{line - 1}'" in err and f" {line}" in err
    assert "the plan's lines are of train.py" in monarchc("inspect", "step.mplan", "--why", "other.py:3", code=2).err
    assert "did you mean" in monarchc("inspect", "step.mplan", "--why", "0.wieght", code=2).err
    assert "line, module, op" in monarchc("inspect", "step.mplan", "--by", "file", code=2).err
    assert "time, bytes, memory" in monarchc("inspect", "step.mplan", "--by", "op", "--sort", "x", code=2).err
    assert "--by line" in monarchc("inspect", "step.mplan", "--sort", "bytes", code=2).err


def test_the_graph_after_any_pass(mlp: Plan, monarchc: Run) -> None:
    def after(name: str) -> str:
        text = monarchc("inspect", "mlp.mplan", "--after", name).out
        return "" if not parse_graph(text) else text

    assert after("trace") == mlp.traced + "\n"
    assert "partitioned<data> {" in after("partition-by-data")
    assert after("partition-by-mesh") == after("partition-by-model")
    assert "all_reduce" in after("join-collectives")
    assert monarchc("inspect", "mlp.mplan", "--text").out == mlp.graph + "\n"


def test_dot_has_every_value_and_edge(mlp: Plan, monarchc: Run) -> None:
    out = monarchc("inspect", "mlp.mplan", "--dot").out
    assert out.startswith('digraph "mlp" {')
    assert out.count(" -> ") == 6
    assert 'label="%mm_1_all_reduce\\nall_reduce over model\\n1.0 KiB"' in out
    assert out.count("{") == out.count("}")


def test_the_page(mlp: Plan, monarchc: Run) -> None:
    result = monarchc("inspect", "mlp.mplan", "--html", "page.html")
    assert result.out == "" and "wrote page.html" in result.err
    assert Path("page.html").read_text().lstrip().lower().startswith("<!doctype html>")
    shown = json.loads(monarchc("inspect", "mlp.mplan", "--html", "page.html", "--against", "mlp.mplan", "--json").out)
    assert shown["page"] == "page.html"


def test_several_sections_at_once(training: Plan, monarchc: Run) -> None:
    names = ["kernels", "comms", "memory"]
    asked = ["--by", "op", "--by", "line", *(f"--{name}" for name in names)]
    shown = json.loads(monarchc("inspect", "step.mplan", "--json", *asked).out)
    assert list(shown) == ["name", "hash", "by op", "by line", *names]
    out = monarchc("inspect", "step.mplan", *asked).out
    heads = ["by op: ", "\nby line: ", "\nkernels: ", "\ncollectives: ", "\nmemory of a worker: "]
    assert all(head in out for head in heads)
    assert max(map(len, out.splitlines())) <= 100


def test_everything_as_json(mlp: Plan, monarchc: Run) -> None:
    shown = json.loads(monarchc("inspect", "mlp.mplan", "--json").out)
    assert shown["name"] == "mlp" and shown["mesh"] == {"data": 2, "model": 2}
    assert shown["inputs"][0] == {
        "kind": "input",
        "name": "x",
        "type": "f32[8@data, 64]",
        "local": [4, 64],
        "bytes": 1024,
        "donated": False,
    }
    assert shown["costs"] == mlp.costs
    assert shown["phases"]["forward"]["collectives"] == 1


def test_a_plan_without_a_report_says_what_to_do(mlp: Plan, monarchc: Run) -> None:
    save_plan(replace(mlp, report=None, traced=""), "bare.mplan")
    assert "mlp on mesh" in monarchc("inspect", "bare.mplan").out
    for section in (["--by", "op"], ["--memory"], ["--why", "relu"], ["--after", "trace"]):
        assert "compile it with" in monarchc("inspect", "bare.mplan", *section, code=2).err


def test_costs_of_another_form_are_left_out_of_what_is_shown(mlp: Plan, monarchc: Run) -> None:
    costs = {"collectives": [1], "peak_bytes": "much", "seconds": {"a": None, "b": {}}}
    save_plan(replace(mlp, costs=costs), "odd.mplan")
    out = monarchc("inspect", "odd.mplan").out
    assert "collectives in a step" not in out and "compiled in" not in out and "peak" not in out


def test_what_a_file_says_cannot_steer_the_terminal(mlp: Plan, monarchc: Run) -> None:
    assert mlp.report is not None
    evil = "\x1b[31mred[/] [bold]\x9b2J"
    values = tuple(replace(v, module=evil, why=evil) if v.instruction >= 0 else v for v in mlp.report.values)
    report = replace(mlp.report, values=values, lines=tuple(evil for _ in mlp.report.lines))
    save_plan(replace(mlp, name=evil, graph="\x1b]0;title\x07\x9b2J", report=report), "hostile.mplan")
    sections = ["--by", "op", "--by", "line", "--by", "module", "--kernels", "--comms", "--memory", "--text", "--dot"]
    for arguments in ([], sections, ["--worker", "data=0"], ["--why", "relu"], ["--json"]):
        out = monarchc("inspect", "hostile.mplan", *arguments).out
        assert all(c.isprintable() or c == "\n" for c in out)
    assert monarchc("inspect", "hostile.mplan").out.startswith("\N{REPLACEMENT CHARACTER}[31mred[/] [bold]")


# -- as a process of its own -----------------------------------------------------------------------------------------


def run_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_as_a_command_of_its_own(mlp: Plan) -> None:
    program = ("-c", "from monarch.compiler.cli import main; main()", "inspect")
    names = ("mlp.mplan", "none.mplan")
    fine, wrong = (python.run(*program, name, capture_output=True, text=True, timeout=120) for name in names)
    assert fine.returncode == 0 and fine.stdout.startswith("mlp on mesh<data=2, model=2>")
    assert wrong.returncode == 2 and wrong.stderr.startswith("monarchc: error: cannot read none.mplan")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["compile", "--help"], ["profile", "--help"]])
def test_help_loads_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys, contextlib\nfrom monarch.compiler.cli import main\n"
        "with contextlib.suppress(SystemExit):\n    main()\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = run_process(code, *arguments)
    assert result.returncode == 0 and "monarchc" in result.stdout


def test_the_shell_completes_programs_of_a_file(folder: Path) -> None:
    from monarch.compiler.cli.completion import complete_program

    assert complete_program("train.py:") == ["train.py:train_step", "train.py:evaluate"]
    assert complete_program("train.py:ev") == ["train.py:evaluate"]
    assert complete_program("ml") == ["mlp.py", "mlp.py:"]
    assert complete_program("none.py:") == []


def test_the_version(monarchc: Run) -> None:
    assert monarchc("--version").out == f"monarchc {monarch.__version__}\n"


# -- generated kernels -------------------------------------------------------------------------------------------------


@pytest.fixture
def fused(folder: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    monarchc("compile", "train.py:train_step", "-o", "fused.mplan")
    monkeypatch.setenv("MONARCH_KERNELS", "off")
    monarchc("compile", "train.py:train_step", "-o", "step.mplan")
    return load_plan("fused.mplan")


def test_generated_kernels_are_listed_by_what_they_do(fused: Plan, monarchc: Run) -> None:
    texts = [str(i.args[1]) for i in fused.instructions if i.op == "kernel"]
    assert texts
    rows = json.loads(monarchc("inspect", "fused.mplan", "--kernels", "--json").out)["kernels"]
    generated = [row for row in rows if row["by"] == "generated"]
    assert sum(row["calls"] for row in generated) == len(texts)
    assert {row["text"] for row in generated} <= set(texts)
    assert all(row["text"].startswith(f"kernel {row['kernel']}(") for row in generated)
    assert sum(row["calls"] for row in rows) == len(
        [i for i in fused.instructions if i.op not in ("getitem", "commit")]
    )
    out = monarchc("inspect", "fused.mplan", "--kernels").out
    assert f"{len(generated)} of them generated" in out
    name = re.findall(r"the text of one: --why (\w+)", out)[0]
    shown = monarchc("inspect", "fused.mplan", "--why", name).out
    (text,) = [row["text"] for row in generated if name in row["values"]]
    assert "\n".join(f"  {line}" for line in text.splitlines()) in shown
    assert "the compiler added it" not in shown and "\\n" not in shown


def test_the_page_shows_generated_kernels(fused: Plan, monarchc: Run) -> None:
    monarchc("inspect", "fused.mplan", "--html", "page.html", "--against", "step.mplan")
    found = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', Path("page.html").read_text())
    page = json.loads(found[0])
    texts = [str(i.args[1]) for i in fused.instructions if i.op == "kernel"]
    assert [text for _, text, _ in page["plan"]["kernels"]] == texts
    assert all('extern "C"' in source and "// train.py:" in source for *_, source in page["plan"]["kernels"])
    calls = [page["plan"]["values"]["call"][at] for at, *_ in page["plan"]["kernels"]]
    assert all(re.fullmatch(r"kernel \w+\((%\w+(, )?)*\)", call) for call in calls)
    assert {text.partition("(")[0].removeprefix("kernel ") for text in texts} <= set(page["comparison"]["kernels"])
    assert page["comparison"]["layouts"] == []  # kernels lay nothing out otherwise


def test_what_kernels_compute_is_counted_as_it_is_without_them(fused: Plan) -> None:
    apart = load_plan("step.mplan")
    for op in ("aten.addmm", "aten.addcdiv"):
        counts = [sum(row["ops"] for row in by(plan, "op") if row["name"] == op) for plan in (apart, fused)]
        assert counts[0] == counts[1] > 0
    seconds = sum(value.seconds for value in report_of(fused).values)
    assert sum(row["computing"] + row["communicating"] for row in by(fused, "op")) == pytest.approx(seconds)


def test_cuda_graphs(folder: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are, what stands between them and why, and what they keep: here 64 bytes each for two arguments,
    what the collective moves and gives, and what the second graph leaves for the third. The result is made where the
    collective's was copied to."""
    monkeypatch.setenv("MONARCH_KERNELS", "off")
    (folder / "recorded.py").write_text("""\
import torch

import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2)
total = monarch.distribute(torch.zeros(16), mesh)


@monarch.program(target="cuda:90", cuda_graphs=True)
def step(x: "f32[32@data, 1]", y: "f32[1, 16]"):
    found = torch.sin(x * y).sum(0)
    total.add_(found.exp().cos())
    return found.neg().tanh()
""")
    overview, memory = monarchc("inspect", "recorded.py").out, monarchc("inspect", "recorded.py", "--memory").out
    assert "for cuda:90, as CUDA graphs\n" in overview
    assert "CUDA graphs: 3 graphs of 3, 2, 3 ops\n" in overview
    assert re.search(r"^  graph 3 +3 +recorded\.py:13 to recorded\.py:14$", overview, re.MULTILINE)
    assert re.search(r"^  all_reduce +1 +recorded\.py:12 +it moves tensors between workers$", overview, re.MULTILINE)
    assert re.search(r"^  commit +1 +the host waits for all workers$", overview, re.MULTILINE)
    assert "  CUDA graphs keep at most 320 B more, for what they read and leave,\n" in memory
    found = json.loads(monarchc("inspect", "recorded.py", "--json").out)["cuda_graphs"]
    assert [each["ops"] for each in found["graphs"]] == [3, 2, 3] and found["kept_bytes"] == 320


@pytest.fixture
def of_library(folder: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of a program whose model's lines are an installed library's."""
    package = folder / "site-packages" / "blocks_of_others"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("""\
import torch


def block(x, up, down):
    hidden = torch.relu(x @ up)
    return hidden @ down
""")
    monkeypatch.syspath_prepend(package.parent)
    (folder / "users.py").write_text("""\
import torch
from blocks_of_others import block

import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2, model=2)
up = monarch.distribute(torch.randn(64, 256), mesh, "[-, @model]")
down = monarch.distribute(torch.randn(256, 64), mesh, "[@model, -]")


@monarch.program
def users(x: "f32[8@data, 64]"):
    y = block(x, up, down)
    return block(y, up, down) + 1.0
""")
    monarchc("compile", "users.py")
    return load_plan("users.mplan")


def test_a_librarys_lines_belong_to_the_users_line_that_called_it(of_library: Plan, monarchc: Run) -> None:
    rows = {row["name"]: row for row in by(of_library, "line")}
    assert {"users.py:14", "users.py:15"} <= set(rows)
    first = rows["users.py:14"]
    assert first["code"] == "y = block(x, up, down)"
    assert {place: kept["code"] for place, kept in first["within"].items()} == {
        "blocks_of_others/__init__.py:5": "hidden = torch.relu(x @ up)",
        "blocks_of_others/__init__.py:6": "return hidden @ down",
    }
    seconds = sum(kept["seconds"] for kept in first["within"].values())
    assert seconds == pytest.approx(first["computing"] + first["communicating"])
    out = monarchc("inspect", "users.mplan", "--by", "line").out
    assert re.search(r"^  users.py:14 .*\n    y = block\(x, up, down\)\n", out, re.MULTILINE)
    assert " blocks_of_others/__init__.py:6 " in out
    for line in ("users.py:15", "blocks_of_others/__init__.py:5"):
        assert "all_reduce over model" in monarchc("inspect", "users.mplan", "--why", line).out
    assert re.search(r" from \S*/users.py:14:", monarchc("inspect", "users.mplan", "--after", "trace").out)


def test_an_error_in_a_library_names_the_users_line(of_library: Plan, monarchc: Run) -> None:
    Path("users.py").write_text(Path("users.py").read_text().replace("block(y, up, down)", "block(y, down, up) "))
    err = monarchc("compile", "users.py", code=2).err
    assert "__init__.py:5:" in err and "  called from users.py:15:" in err


def test_what_is_said_to_ask_more_can_be_asked(folder: Path, monarchc: Run) -> None:
    (folder / "renamed.py").write_text((folder / "mlp.py").read_text().replace("data", "rows"))
    monarchc("compile", "renamed.py", "-o", "renamed.mplan")
    (more,) = re.findall(r"^  more: (.*) --html p\.html$", monarchc("inspect", "renamed.mplan").out, re.MULTILINE)
    assert "--why renamed.py:" in more and "--worker rows=0" in more
    assert len(monarchc("inspect", "renamed.mplan", *more.split()).out.splitlines()) > 20
