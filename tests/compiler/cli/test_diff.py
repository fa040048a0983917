"""`monarchc diff`: what changed between two plans, whatever their values are called."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from monarch.compiler.cli.load import load_program
from monarch.compiler.inspect.differences import differences
from monarch.compiler.plan import Plan
from tests.compiler.cli.conftest import PROGRAMS, Run

MLP = PROGRAMS["mlp.py"]


@pytest.fixture
def compiled(folder: Path) -> dict[str, Plan]:
    texts = {
        "mlp": MLP,
        "moved": "# a line more\n" + MLP,
        "replicated": MLP.replace('"[-, @model]"', '"[-, -]"').replace('"[@model, -]"', '"[-, -]"'),
        "deeper": MLP.replace("    return", "    hidden = torch.sigmoid(hidden)\n    return"),
    }
    plans = {}
    for name, text in texts.items():
        (folder / f"{name}_.py").write_text(text)
        plans[name] = load_program(f"{name}_.py:mlp").compile()
        plans[name].save(f"{name}.mplan")
    return plans


def test_a_plan_does_not_differ_from_itself(compiled: dict[str, Plan], monarchc: Run) -> None:
    assert not differences(compiled["mlp"], compiled["mlp"]).any
    result = monarchc("diff", "mlp.mplan", "mlp.mplan", "--exit-code")
    assert result.out == "no difference: both are the same program.\n"


def test_moved_lines_and_renamed_values_are_no_difference(compiled: dict[str, Plan], monarchc: Run) -> None:
    moved = compiled["moved"]
    assert moved.report is not None
    renamed = tuple(replace(value, name=f"v{number}") for number, value in enumerate(moved.report.values))
    assert not differences(compiled["mlp"], replace(moved, report=replace(moved.report, values=renamed))).any
    assert "no difference" in monarchc("diff", "mlp.mplan", "moved.mplan", "--exit-code").out


def test_an_op_more_is_all_that_differs(compiled: dict[str, Plan], monarchc: Run) -> None:
    found = differences(compiled["mlp"], compiled["deeper"])
    assert [(entry.sign, entry.op, entry.where) for entry in found.ops] == [("+", "aten.sigmoid", "deeper_.py:14")]
    assert found.layouts == () and found.collectives == {} and found.values == {}
    assert found.totals["ops"] == (4, 5)
    back = differences(compiled["deeper"], compiled["mlp"])
    assert [(entry.sign, entry.op) for entry in back.ops] == [("-", "aten.sigmoid")]
    assert "+  aten.sigmoid" in monarchc("diff", "mlp.mplan", "deeper.mplan", "--exit-code", code=1).out


def test_another_layout_and_what_it_spares(compiled: dict[str, Plan], monarchc: Run) -> None:
    found = differences(compiled["mlp"], compiled["replicated"])
    assert found.values["state up"] == ("f32[64, 256@model]", "f32[64, 256]")
    assert found.collectives == {"all_reduce over model": ((1, 1024), (0, 0))}
    assert [(entry.sign, entry.op, entry.bytes) for entry in found.ops] == [("-", "all_reduce", 1024)]
    changed = {(entry.op, entry.before, entry.after) for entry in found.layouts}
    assert ("aten.relu", "f32[8@data, 256@model]", "f32[8@data, 256]") in changed
    assert all(entry.where.startswith("replicated_.py:1") for entry in found.layouts)
    out = monarchc("diff", "mlp.mplan", "replicated.mplan").out
    assert "state up    f32[64, 256@model]  f32[64, 256]" in out
    assert max(map(len, out.splitlines())) <= 100


def test_as_json(compiled: dict[str, Plan], monarchc: Run) -> None:
    shown = json.loads(monarchc("diff", "mlp.mplan", "deeper.mplan", "--json").out)
    assert shown["differ"] is True and shown["same_program"] is False
    assert shown["ops"][0]["op"] == "aten.sigmoid"
    assert shown["kernels"] == {"aten.sigmoid_.default": [0, 1]}


@pytest.mark.parametrize("other", ["moved", "replicated", "deeper"])
def test_the_page_compares_by_the_same_rule(compiled: dict[str, Plan], monarchc: Run, other: str) -> None:
    monarchc("inspect", f"{other}.mplan", "--html", "page.html", "--against", "mlp.mplan")
    (text,) = re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', Path("page.html").read_text(), re.DOTALL
    )
    on_the_page = json.loads(text)["comparison"]
    shown = json.loads(monarchc("diff", "mlp.mplan", f"{other}.mplan", "--json").out)
    assert shown.pop("differ") is (other != "moved") and not shown.pop("same_program")
    heads = {name: on_the_page.pop(name) for name in ("before", "now", "units")}
    assert on_the_page == shown
    assert heads["before"] == {"name": "mlp", "mesh": "mesh<data=2, model=2>", "target": "cpu"}
    assert set(heads["units"]) < set(shown["totals"])
