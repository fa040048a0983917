"""`monarchc sweep`: other meshes, machines and layouts, each as if the program had been written so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from monarch.compiler.cli.load import load_program
from monarch.compiler.cli.sweep import with_layouts
from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.inspect.values import report_of
from monarch.compiler.plan import MeshSpec
from monarch.compiler.plan.file import load_plan
from tests.compiler.cli.conftest import Run


def rows_of(monarchc: Run, *arguments: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(monarchc("sweep", *arguments, "--json").out)["rows"]
    return rows


def test_each_combination_is_a_row(folder: Path, monarchc: Run) -> None:
    meshes, machines = ("data=2,model=2", "data=4,model=1"), ("cpu", "h100-8")
    arguments = [text for mesh in meshes for text in ("--mesh", mesh)]
    arguments += [text for machine in machines for text in ("--machine", machine)]
    rows = rows_of(monarchc, "mlp.py", *arguments, "--layout", "up=[-, -]")
    assert [(row["mesh"], row["machine"], row["layout"]) for row in rows] == [
        (mesh, machine, layout) for mesh in meshes for machine in machines for layout in ("", "up=[-, -]")
    ]
    assert all(row["fits"] and row["found"]["seconds"] > 0 for row in rows)
    alone = [row for row in rows if row["mesh"] == "data=4,model=1"]
    assert all(row["found"]["sent"] == {} for row in alone)
    out = monarchc("sweep", "mlp.py", *arguments).out
    assert re.search(r"^  data=2,model=2 +h100-8 ", out, re.MULTILINE) and "fastest of those that fit: " in out


@pytest.mark.parametrize("layouts", [("[-, -]", "[@model, -]"), ("[@data, -]", "[-, @data]"), ("[-, -]", "[-, -]")])
def test_a_layout_is_as_if_the_file_had_it(folder: Path, monarchc: Run, layouts: tuple[str, str]) -> None:
    up, down = layouts
    text = Path("mlp.py").read_text()
    Path("mlp.py").write_text(text.replace('"[-, @model]"', f'"{up}"').replace('"[@model, -]"', f'"{down}"'))
    monarchc("compile", "mlp.py", "-o", "written.mplan")
    Path("mlp.py").write_text(text)
    Path("kept").mkdir()
    rows = rows_of(monarchc, "mlp.py", "--layout", f"up={up}; down={down}", "--keep", "kept")
    written, swept = load_plan("written.mplan"), load_plan(rows[1]["plan"])
    assert swept.graph == written.graph and swept.hash == written.hash
    assert rows[1]["found"]["peak"] == written.costs["peak_bytes"]


def test_what_an_optimizer_keeps_lies_as_its_parameter(folder: Path) -> None:
    graph = load_program("train.py:train_step").graph
    changed = with_layouts(graph, [("0.weight", "[@data, -]")])
    assert str(with_layouts(graph, [])) == str(graph)
    laid = {label: str(type_.layout) for label, type_ in changed.states.items() if "0.weight" in label}
    assert laid["0.weight"] == "[@data, -]"
    kept = [layout for label, layout in laid.items() if "exp_avg" in label]
    assert len(kept) == 2 and set(kept) == {"[@data, -]"}


def test_what_does_not_fit_says_so(folder: Path, monarchc: Run) -> None:
    Path("tiny.toml").write_text(
        'target = "cpu"\nmemory = "4KiB"\n[[links]]\nwithin = "a host"\nbandwidth = 1e9\nlatency = 1e-6\n'
    )
    (row,) = json.loads(monarchc("sweep", "mlp.py", "--machine", "tiny.toml", "--json", code=1).out)["rows"]
    assert not row["fits"] and row["found"]["peak"] > row["limit"] == 4096
    out = monarchc("sweep", "mlp.py", "--machine", "tiny.toml", code=1).out
    assert "does not fit: a worker holds" in out and out.splitlines()[-1].startswith("  none fits: ")
    out = monarchc("sweep", "mlp.py", "--memory-limit", "1KiB", code=1).out
    assert out.splitlines()[-1] == "  none of them can be compiled: the table has the errors"
    (limited,) = json.loads(monarchc("sweep", "mlp.py", "--memory-limit", "1KiB", "--json", code=1).out)["rows"]
    assert limited["found"] is None and "1.0 KiB" in limited["error"]


def test_workers_share_a_machine_with_fewer_cores(folder: Path, monarchc: Run) -> None:
    link = '[[links]]\nwithin = "a host"\nbandwidth = 1e9\nlatency = 1e-6\n'
    Path("own.toml").write_text(f'target = "cpu"\nmemory = "1MiB"\n{link}')
    Path("two.toml").write_text(f'target = "cpu"\nmemory = "1MiB"\ncores = 2\n{link}')
    own, two = rows_of(monarchc, "mlp.py", "--mesh", "data=2,model=2", "--machine", "own.toml", "--machine", "two.toml")
    assert two["found"]["seconds"] == pytest.approx(2 * own["found"]["seconds"])
    assert (own["limit"], two["limit"]) == (1 << 20, 1 << 19)
    alone = rows_of(monarchc, "mlp.py", "--mesh", "data=2,model=1", "--machine", "own.toml", "--machine", "two.toml")
    assert alone[0]["found"] == alone[1]["found"]
    auto = rows_of(monarchc, "mlp.py", "--mesh", "data=2,model=2", "--machine", "two.toml", "--auto")
    written = next(row for row in auto if row["layout"] == "layouts as written")
    assert written["found"]["seconds"] == two["found"]["seconds"]


def test_attention_takes_longer_than_products_of_as_many_operations(folder: Path, monarchc: Run) -> None:
    rates = 'target = "cpu"\nmemory_bandwidth = 1e18\nstart = 1e-12\n'
    link = '[[links]]\nwithin = "a host"\nbandwidth = 1e9\nlatency = 1e-6\n'
    Path("product.toml").write_text(rates + link)
    Path("attention.toml").write_text(f"{rates}attention = 0.25\n{link}")
    tensor = '"f32[2@data, 4, 64, 16]"'
    Path("attend.py").write_text(
        "import torch.nn.functional as F\nimport monarch\nfrom monarch.distributed import Mesh\n"
        f"mesh = Mesh(data=2)\n@monarch.program(mesh=mesh)\ndef attend(q: {tensor}, k: {tensor}, v: {tensor}):\n"
        "    return F.scaled_dot_product_attention(q, k, v)\n"
    )
    product, attention = rows_of(monarchc, "attend.py", "--machine", "product.toml", "--machine", "attention.toml")
    assert attention["found"]["seconds"] == pytest.approx(4 * product["found"]["seconds"], rel=1e-3)
    assert attention["found"]["flops"] == product["found"]["flops"]


def test_mistakes_are_told(folder: Path, monarchc: Run) -> None:
    assert "no parameter is called uup" in monarchc("sweep", "mlp.py", "--layout", "uup=[-, -]", code=2).err
    assert "did you mean up?" in monarchc("sweep", "mlp.py", "--layout", "uup=[-, -]", code=2).err
    assert "is not NAME=LAYOUT" in monarchc("sweep", "mlp.py", "--layout", "up", code=2).err
    assert "did you mean h100-8" in monarchc("sweep", "mlp.py", "--machine", "h100", code=2).err
    assert "unknown mesh dim 'dta'" in monarchc("sweep", "mlp.py", "--layout", "up=[@dta, -]", code=2).err
    assert "mkdir" in monarchc("sweep", "mlp.py", "--keep", "nowhere", code=2).err


def test_the_estimate_is_the_sum_where_nothing_is_started_ahead(folder: Path) -> None:
    plan = load_program("train.py:train_step").compile()
    found = estimate(plan, cluster_of("cpu"))
    values = report_of(plan).values
    assert found.seconds == pytest.approx(sum(value.seconds for value in values))
    assert found.waiting == pytest.approx(found.communicating)
    assert sum(found.sent.values()) == sum(value.sent for value in values)
    assert found.unit == "examples" and found.items == 8 and 0 < found.used < 1


def test_collectives_that_are_started_ahead_hide_behind_computing(folder: Path) -> None:
    text = Path("train.py").read_text()
    Path("train.py").write_text(
        text.replace(
            "@monarch.program\ndef train_step", '@monarch.program(target="cuda:90", collectives="nccl")\ndef train_step'
        )
    )
    plan = load_program("train.py:train_step", MeshSpec.of(data=2)).compile(binaries=False)
    assert any(value.op == "wait" for value in report_of(plan).values) and not plan.binaries
    found = estimate(plan, cluster_of("cuda:90"))
    together = found.computing + sum(found.communicating.values())
    assert max(found.computing, sum(found.communicating.values())) <= found.seconds <= together
    assert found.seconds == pytest.approx(found.computing + sum(found.waiting.values()))


def test_layouts_are_found_and_kept(folder: Path, monarchc: Run) -> None:
    Path("kept").mkdir()
    asked = ["mlp.py", "--auto", "--layout", "down=[@model, -]", "--keep", "kept"]
    found = json.loads(monarchc("sweep", *asked, "--json").out)
    *others, chosen = found["rows"]
    assert {"layouts as written", "layouts found"} <= {row["layout"] for row in found["rows"]}
    assert all(chosen["found"]["seconds"] <= row["found"]["seconds"] for row in others)
    (answer,) = found["auto"]
    assert answer["exact"] and "down" not in answer["parameters"] and chosen["layout"] == answer["chosen"]
    plan = load_plan(chosen["plan"])
    assert plan.costs["peak_bytes"] == chosen["found"]["peak"]
    assert 'state "down" : f32[128, 64] of f32[256@model, 64]' in " ".join(plan.graph.split())
    out = monarchc("sweep", *asked[:4]).out
    assert "layouts as written" in out and "data=2,model=2 on cpu: " in out


def test_layouts_that_do_not_fit_say_what_is_missing(folder: Path, monarchc: Run) -> None:
    out = monarchc("sweep", "mlp.py", "--auto", "--memory-limit", "1KiB", code=1).out
    assert "no layouts of 'mlp' that were found fit 1.0 KiB a worker" in out and "are missing" in out
