"""Why a value has its layout: chains back to what the user said, as the text says it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.why import Cause, explain
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.text import parse_graph
from tests.compiler.inspect.programs import laid_out, megatron, training_plan

EXPECTED = Path(__file__).with_name("why")


@pytest.mark.parametrize("name", ["mm", "relu", "mm_1", "mm_1_all_reduce", "up"])
def test_explanations_of_a_megatron_mlp(name: str, request: pytest.FixtureRequest) -> None:
    # Lines of tests/compiler/inspect/programs.py move: what is said of them must not.
    found = re.sub(r"programs\.py:\d+:\d+", "programs.py", str(explain(megatron(), name)))
    path = EXPECTED / f"{name}.txt"
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found + "\n")
    assert found + "\n" == path.read_text()


def leaves(cause: Cause) -> list[Cause]:
    return [leaf for each in cause.causes for leaf in leaves(each)] if cause.causes else [cause]


def test_a_chain_ends_where_the_user_said_so() -> None:
    found = explain(megatron(), "mm_1")
    by_dim = {chain.decision.mesh_dim: chain for chain in found.chains}
    assert [leaf.name for leaf in leaves(by_dim["model"])] == ["down", "up"]
    (said,) = leaves(by_dim["data"])
    assert said.said and said.decision.why.startswith("layout() at programs.py:")
    assert said.source is not None and said.line == 'x = monarch.layout(x, "[@data, -]")'


def test_a_layout_line_is_a_cause_also_where_the_value_lay_so() -> None:
    plan = laid_out()
    assert plan.report is not None and len([value for value in plan.report.values if value.mesh_dims]) == 1
    for name in ("x", "relu"):
        for chain in explain(plan, name).chains:
            assert chain.said
            assert re.search(r"; layout\(\) at programs\.py:\d+:\d+ says so too$", chain.decision.why), (
                chain.decision.why
            )
    assert "the program gives input 0 the layout [@data, -]; layout() at" in str(explain(plan, "x"))
    model = explain(plan, "mm_1").chains[1]
    relu = next(cause for cause in model.causes if cause.name == "relu")
    assert relu.said and [cause.name for cause in relu.causes] == ["mm"]
    assert relu.decision.why in str(explain(plan, "mm_1"))
    assert "layout()" not in str(explain(plan, "mm"))[: str(explain(plan, "mm")).index("because")]


def test_a_collective_names_both_sides() -> None:
    found = explain(megatron(), "%mm_1_all_reduce")
    (moved,) = found.moved
    assert found.mesh_dims == ("model",) and found.sent == 512
    assert moved.before == "f32[8@data, 64] partial<sum: model>" and moved.after == "f32[8@data, 64]"
    assert [chain.name for chain in moved.value_chains] == ["mm_1"]
    assert [chain.name for chain in moved.taker_chains] == ["add"]
    assert all(len(chain.decision.alternatives) > 1 for chain in moved.value_chains)


def test_one_result_of_a_joined_collective() -> None:
    plan = training_plan("data")
    assert plan.report is not None
    values = plan.report.values
    number, joined = max(enumerate(values), key=lambda entry: len(entry[1].types) if entry[1].mesh_dims else 0)
    results = [value for value in values if value.reads == (number,)]
    assert len(results) == len(joined.types) > 5
    whole = explain(plan, joined.name)
    assert len(whole.moved) == len(joined.types)
    for at, result in enumerate(results):
        (moved,) = explain(plan, result.name).moved
        assert moved.value == whole.moved[at].value == joined.reads[at]
        assert f"%{values[moved.value].name} is a pending sum over 'data'" in moved.why
        assert moved.takers


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["tensor", "nested"])
def test_every_value_can_be_explained(kind: str) -> None:
    plan = training_plan(kind)
    assert plan.report is not None
    for value in plan.report.values:
        found = explain(plan, value.name)
        assert found.name == value.name and str(found).startswith(f"%{value.name} = ")
        assert found.chains or found.moved or not value.traced


def test_states_and_traced_values_by_name() -> None:
    plan = training_plan("nested")
    assert explain(plan, "blocks.0.mlp.up.weight").call == 'state "blocks.0.mlp.up.weight"'
    assert plan.report is not None
    several = [value.traced for value in plan.report.values if value.traced and value.traced != value.name]
    names = {value.name for value in plan.report.values}
    gone = next(name for name in several if name not in names)
    found = explain(plan, gone)
    assert {found.name, *found.others} == {v.name for v in plan.report.values if v.traced == gone}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("blocks.0.mlp.up.wieght", "did you mean blocks.0.mlp.up.weight"),
        ("%nothing_like_it_at_all", "the plan's graph names its values"),
        ("", "the plan's graph names its values"),
    ],
)
def test_names_that_are_none(name: str, hint: str) -> None:
    with pytest.raises(MonarchError) as caught:
        explain(training_plan("nested"), name)
    assert str(caught.value).startswith(f"plan 'train_step' has no value {name.removeprefix('%')!r}\n  {hint}")


def test_a_plan_without_a_report() -> None:
    plan: Plan = compile_graph(parse_graph("graph @f on mesh<> {\n %x = input 0 : f32[2]\n return %x\n}"))
    with pytest.raises(MonarchError, match="plan 'f' has no report: it does not know why"):
        explain(plan, "x")
