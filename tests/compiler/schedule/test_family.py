"""The plan of a program of named sizes as data: for each value it is the plan that its template gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.errors import MonarchError, PlanError
from monarch.compiler.pipeline import compile_graph, compile_template
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.schedule.family import plan_at, sizes_of_inputs, with_sizes
from monarch.compiler.schedule.template import Template
from monarch.language import Mesh, program

MESH = Mesh.abstract(data=2)


@program(mesh=MESH)
def model(tokens: "i64[b@data, t]", table: "f32[11, 32]"):
    x = F.embedding(tokens, table)
    scores = (x @ x.transpose(1, 2)).softmax(-1)
    mixed = (scores @ x).flatten(0, 1)
    return mixed[: tokens.shape[0] * 2], mixed.mean(), torch.cat([x, x[:, :1]], 1).sum((0, 1))


@pytest.fixture(scope="module")
def found() -> tuple[Plan, Template]:
    """The plan as a file gives it again, and its template."""
    tokens, table = torch.zeros(4, 30, dtype=torch.int64), torch.zeros(11, 32)
    options = CompileOptions()
    named = model.trace_named(tokens, table)
    assert named is not None
    template = compile_template(named[0], options, named[1])
    plan = with_sizes(compile_graph(model.trace(tokens, table).graph, options), template)
    assert template.spans  # of sizes that are expressions
    return plan_from_bytes(plan_bytes(plan)), template


@given(values=st.fixed_dictionaries({"b": st.integers(2, 20), "t": st.integers(2, 300)}))
def test_a_plan_for_some_sizes_is_its_templates(found: tuple[Plan, Template], values: dict[str, int]) -> None:
    plan, template = found
    if template.scope.holds(values):
        assert plan_at(plan, values).hash == template.at(values).hash
    else:
        with pytest.raises(MonarchError, match="serves sizes with"):
            plan_at(plan, values)


def test_sizes_are_those_of_the_tensors(found: tuple[Plan, Template]) -> None:
    plan, _ = found
    tokens = torch.zeros(6, 9, dtype=torch.int64)
    assert sizes_of_inputs(plan, ["tokens", "table"], {"tokens": tokens}) == {"b": 6, "t": 9}
    assert plan_at(plan, {"b": 6}).inputs[0].type.shape == (6, 30)  # t is the example's
    assert sizes_of_inputs(plan, ["tokens", "table"], {"table": torch.zeros(11, 32)}) == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"b": 5}, r"serves sizes with \(b%2\) == 0, not b=5, t=30"),
        ({"t": 1}, "serves sizes of at least 2, not t=1"),
        ({"n": 4}, "has no size 'n'"),
    ],
)
def test_sizes_that_it_does_not_serve_are_errors(
    found: tuple[Plan, Template], values: dict[str, int], said: str
) -> None:
    with pytest.raises(MonarchError, match=said):
        plan_at(found[0], values)


def _edited(plan: Plan, **members: Any) -> Plan:
    made = copy.copy(plan)
    object.__setattr__(made, "sizes", {**plan.sizes, **members})
    return made


def _deep(levels: int) -> list[Any]:
    return [[1, ["//", _deep(levels - 1), [[1]]]]] if levels else [[1]]


@pytest.mark.parametrize(
    "members",
    [
        {"names": {"t": 6, "b": 1}},
        {"names": {"t": 6}},
        {"conditions": [[1]]},
        {"conditions": [[[[1, "z"]], "==", True, ""]]},
        {"conditions": [[[[1, ["//", [[1, "t"]], []]]], "==", True, ""]]},
        {"conditions": [[[[1, ["eval", [], []]]], "==", True, ""]]},
        {"conditions": [[[[1, *["t"] * 80]], ">", True, ""]]},
        {"conditions": [[_deep(40), ">", True, ""]]},
        {"spans": []},
        {"spans": [[-1, 0, 0]]},
        {"program": 3},
        {"head": []},
    ],
)
def test_what_the_compiler_did_not_write_is_refused(found: tuple[Plan, Template], members: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        plan_at(_edited(found[0], **members), {"t": 8, "b": 8} if "names" not in members else {"t": 8})
