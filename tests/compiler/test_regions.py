"""Ops with regions in graphs: their text, their checks, who tells all workers which way to go, and their plans."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies

from monarch.compiler.errors import GraphError, LayoutError, MonarchError, PlanError
from monarch.compiler.pipeline import compile_graph, partition_graph
from monarch.compiler.plan import CompileOptions, Instruction, Slot
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.text import parse_graph
from monarch.compiler.verify import verify
from tests.compiler.reference import run_reference

COND = """graph @f on mesh<data=2> {
  region "cond0.then" {
    %a = input 0                  : f32[8, 4]
    %b = aten.mul.Tensor(%a, 2)   : f32[8, 4]
    return %b
  }
  region "cond0.else" {
    %a = input 0                  : f32[8, 4]
    %b = aten.neg(%a)             : f32[8, 4]
    return %b
  }
  %x = input 0                    : f32[8@data, 4]
  %s = aten.sum(%x)               : f32[]
  %p = aten.gt.Scalar(%s, 0)      : bool[]
  %c = cond(%p, [%x], ["cond0.then", "cond0.else"]) : (f32[8, 4])
  %y = getitem(%c, 0)             : f32[8, 4]
  return %y
}"""

LOOP = """graph @f on mesh<data=2> {
  region "loop.condition" {
    %i = input 0                  : i64[]
    %a = input 1                  : f32[8]
    %n = input 2                  : i64[]
    %p = aten.lt.Scalar(%i, 3)    : bool[]
    return %p
  }
  region "loop.body" {
    %i = input 0                  : i64[]
    %a = input 1                  : f32[8]
    %n = input 2                  : i64[]
    %j = aten.add.Tensor(%i, 1)   : i64[]
    %b = aten.exp(%a)             : f32[8]
    return %j, %b
  }
  %z = aten.full([], 0, dtype=i64) : i64[]
  %x = input 0                    : f32[8@data]
  %c = while_loop([%z, %x], [], ["loop.condition", "loop.body"]) : (i64[], f32[8])
  %y = getitem(%c, 1)             : f32[8]
  return %y
}"""


@pytest.mark.parametrize("text", [COND, LOOP])
def test_regions_are_text_that_parses_back(text: str) -> None:
    graph = parse_graph(text)
    verify(graph, run=True)
    assert str(parse_graph(str(graph))) == str(graph) == str(graph.copy())
    partitioned = partition_graph(graph)
    verify(partitioned, run=True)
    assert str(parse_graph(str(partitioned))) == str(partitioned)


def test_regions_take_shards_where_the_program_has_them() -> None:
    text = str(partition_graph(parse_graph(COND)))
    assert len(re.findall(r"%a = input 0 +: f32\[4, 4\] of f32\[8@data, 4\]", text)) == 2
    assert "gather" not in text


def test_a_predicate_that_workers_might_round_differently_comes_from_the_first() -> None:
    text = str(partition_graph(parse_graph(COND)))
    assert re.search(r'%\w+ = broadcast\(\[%p\], \["data"\], 0\)', text) is None  # all have the all_reduce's bits
    rounded = COND.replace("%p = aten.gt.Scalar(%s, 0) ", "%e = aten.exp(%s) : f32[]\n  %p = aten.gt.Scalar(%e, 0) ")
    text = str(partition_graph(parse_graph(rounded)))
    assert re.search(r'%\w+ = broadcast\(\[%p\], \["data"\], 0\)', text)


def test_a_loop_that_counts_asks_nobody_and_one_that_rounds_does() -> None:
    assert "broadcast" not in str(partition_graph(parse_graph(LOOP)))
    rounding = LOOP.replace(
        "    %p = aten.lt.Scalar(%i, 3)    : bool[]",
        "    %e = aten.sum(%a)             : f32[]\n    %p = aten.lt.Scalar(%e, 3)    : bool[]",
    )
    text = str(partition_graph(parse_graph(rounding)))
    assert "broadcast" in text.partition('region "loop.body"')[0]


WRONG = {
    "an unknown region": ('"cond0.else"])', '"cond9.else"])', "names the region 'cond9.else'"),
    "a float as predicate": ("cond(%p,", "cond(%s,", "has to be bool"),
    "too few inputs": ("[%x], [", "[], [", "other values than that takes"),
    "one region": (', "cond0.else"]', "]", "has to name 2 regions"),
    "a state": ('"cond0.then" {\n    %a = input 0', '"cond0.then" {\n    %a = state "w"', "reads more than it is"),
    "what it gives": (": (f32[8, 4])", ": (f32[4, 8])", "gives other values|element 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_the_verifier_finds_what_crosses_the_edge_wrongly(case: str) -> None:
    before, after, words = WRONG[case]
    assert before in COND
    with pytest.raises(GraphError, match=words):
        verify(parse_graph(COND.replace(before, after)))


STEPS = {
    "tanh": "aten.tanh({})",
    "product": "aten.mm({}, %w)",
    "softmax": "aten._softmax({}, 1, false)",
    "rows": "aten._softmax({}, 0, false)",
    "flip": "aten.flip({}, [0])",
    "sum": "aten.cumsum({}, 1)",
}
LAYOUTS = ("8, 8", "8@data, 8", "8, 8@model", "8@data, 8@model", "8@(data,model), 8", "8@model, 8@data")


def chain(steps: list[str], name: str) -> str:
    """Lines that take %a and %w, and make %name."""
    lines, value = [], "%a"
    for number, step in enumerate(steps):
        lines.append(f"    %{name}{number} = {STEPS[step].format(value)} : f32[8, 8]")
        value = f"%{name}{number}"
    return "\n".join([*lines, f"    %{name} = aten.mul.Tensor({value}, 0.5) : f32[8, 8]"])


def region_program(op: str, first: list[str], second: list[str], layouts: tuple[str, str]) -> str:
    index = "    %n = input {} : i64[]\n"
    given = "    %a = input 0 : f32[8, 8]\n    %w = input 1 : f32[8, 8]\n"
    if op == "cond":
        regions = [given + chain(first, "r") + "\n    return %r", given + chain(second, "r") + "\n    return %r"]
        call = '%c = cond(%p, [%x, %v], ["one", "two"]) : (f32[8, 8])'
    elif op == "while_loop":
        test = "    %s = aten.sum(%a) : f32[]\n    %l = aten.lt.Scalar(%n, 3) : bool[]\n    return %l"
        regions = [given + index.format(2) + test, given + index.format(2) + chain(first, "r") + "\n    return %r"]
        call = '%c = while_loop([%x], [%v], ["one", "two"]) : (f32[8, 8])'
    else:
        taken = given.replace("%w = input 1 : f32[8, 8]", "%e = input 1 : f32[8]\n    %w = input 2 : f32[8, 8]")
        body = f"    %b = aten.add.Tensor(%a, %e) : f32[8, 8]\n{chain(first, 'r')}\n{chain(second, 'q')}"
        regions = [taken + index.format(3) + body + "\n    return %r, %q"]
        call = '%c = scan([%x], [%v], [%v], ["one"], 8, true) : (f32[8, 8], f32[8, 8, 8])'
    text = "".join(f'  region "{name}" {{\n{body}\n  }}\n' for name, body in zip(("one", "two"), regions, strict=False))
    results = "  %y = getitem(%c, 0) : f32[8, 8]\n"
    returns = "%y"
    if op == "scan":
        results, returns = results + "  %q = getitem(%c, 1) : f32[8, 8, 8]\n", "%y, %q"
    return (
        f"graph @f on mesh<data=2, model=2> {{\n{text}  %x = input 0 : f32[{layouts[0]}]\n"
        f"  %v = input 1 : f32[{layouts[1]}]\n  %s = aten.sum(%x) : f32[]\n  %p = aten.gt.Scalar(%s, 0) : bool[]\n"
        f"  {call}\n{results}  return {returns}\n}}"
    )


@settings(max_examples=25, deadline=None)
@given(
    op=strategies.sampled_from(["cond", "while_loop", "scan"]),
    first=strategies.lists(strategies.sampled_from(sorted(STEPS)), max_size=3),
    second=strategies.lists(strategies.sampled_from(sorted(STEPS)), max_size=3),
    layouts=strategies.tuples(strategies.sampled_from(LAYOUTS), strategies.sampled_from(LAYOUTS)),
    seed=strategies.integers(0, 3),
)
def test_any_region_gives_on_any_layout_what_one_worker_makes(
    op: str, first: list[str], second: list[str], layouts: tuple[str, str], seed: int
) -> None:
    graph = parse_graph(region_program(op, first, second, layouts))
    verify(graph, run=True)
    generator = torch.Generator().manual_seed(seed)
    inputs = {at: torch.randn(8, 8, generator=generator) for at in range(2)}
    wanted, _ = run_reference(graph, inputs)
    partitioned = partition_graph(graph)
    verify(partitioned, run=True)
    found, _ = run_reference(partitioned, inputs, poison=True)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_workers_agree_and_compute_what_one_would(sign: float) -> None:
    x = torch.arange(32.0).view(8, 4) * sign
    (y,), _ = run_reference(partition_graph(parse_graph(COND)), {0: x})
    assert torch.equal(y, x * 2 if sign > 0 else -x)


def test_a_plans_functions_are_checked_as_it_is() -> None:
    plan = compile_graph(parse_graph(COND))
    assert plan_from_bytes(plan_bytes(plan)).hash == plan.hash
    read = plan_from_bytes(plan_bytes(plan)).functions
    assert {name: each.instructions for name, each in read.items()} == {
        name: each.instructions for name, each in plan.functions.items()
    }
    wrong = Instruction("aten.neg.default", (Slot(7),), {}, 1)
    name = "cond0.then"
    broken = replace(plan.functions[name], instructions=(wrong,))
    with pytest.raises(PlanError, match="function 'cond0.then': instruction 0"):
        plan_bytes(replace(plan, functions={**plan.functions, name: broken}))
    with pytest.raises(PlanError, match="cannot call"):
        plan_bytes(replace(plan, functions={name: plan.functions[name]}))


def test_plans_for_gpus_have_no_regions_yet() -> None:
    with pytest.raises(MonarchError, match="run on CPUs alone: not for cuda:90") as raised:
        compile_graph(parse_graph(COND), CompileOptions(target="cuda:90"))
    assert "torch.where" in raised.value.hint


def test_values_that_vary_do_not_cross_the_edge() -> None:
    varying = COND.replace("f32[8@data, 4]", "f32[8, 4] varying<data>")
    with pytest.raises(LayoutError, match="varies along 'data'"):
        partition_graph(parse_graph(varying))


def test_what_regions_take_counts_as_memory() -> None:
    big = COND.replace("[8, 4]", "[512, 64]").replace("[8@data, 4]", "[512@data, 64]")
    branch = "    %b = aten.neg(%a)             : f32[512, 64]"
    assert branch in big
    small = compile_graph(parse_graph(big), report=True).costs["peak_bytes"]
    longer = "    %d = aten.cumsum(%a, 1)       : f32[512, 64]\n    %b = aten.cumsum(%d, 1) : f32[512, 64]"
    assert compile_graph(parse_graph(big.replace(branch, longer)), report=True).costs["peak_bytes"] > small
