"""What is found computes what PyTorch does, costs no more than what people write, and says why and what is missing."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from monarch.compiler.cost.cluster import cluster_of, load_cluster
from monarch.compiler.errors import LayoutError, MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.inspect.why import explain
from monarch.compiler.pipeline import compile_graph, partition_graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.search import find
from monarch.compiler.search.find import FOUND, WRITTEN, find_layouts
from monarch.compiler.search.layouts import FoundLayouts, written
from monarch.compiler.text import parse_graph, parse_layout
from monarch.compiler.types import MeshSpec
from monarch.language import Mesh
from tests.compiler.reference import run_reference
from tests.compiler.search.test_patterns import mlps, step_of
from tests.compiler.test_depth import training_step
from tests.compiler.training import GPT, Step, check

CPU = cluster_of("cpu")


@pytest.mark.sample(1)
@pytest.mark.parametrize("machine", ["cpu", "h100-8"])
def test_results_are_those_of_pytorch(machine: str) -> None:
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 64, (2, 8, 16))
    mesh = MeshSpec.of(data=2, model=2)
    step = Step(GPT(64, 32, layers=1), mesh, (tokens, targets), ("[-, -]", "[-, -]"), lambda name, p: None)
    answer = find_layouts(step.graph, load_cluster(machine))
    assert answer.candidates[0].name == WRITTEN and answer.candidates[-1].name == FOUND
    for candidate in answer.candidates:
        partitioned = partition_graph(candidate.layouts.on(step.graph))
        check(step, *run_reference(partitioned, step.values))
        assert candidate.estimate is not None
        assert answer.chosen.estimate is not None and answer.chosen.estimate.seconds <= candidate.estimate.seconds


def test_the_answer_is_what_the_compiler_estimates() -> None:
    graph = training_step(["whole"] * 3)
    answer = find_layouts(graph, CPU)
    plan = compile_graph(answer.chosen.layouts.on(graph), answer.options, report=True, cluster=CPU)
    assert estimate(plan, CPU) == answer.chosen.estimate


def test_presets_given_are_candidates() -> None:
    graph = parse_graph(BOUND.replace('"w"', '"w.weight"').replace('"v"', '"adamw.exp_avg[w.weight]"'))
    preset = written(graph, {"w.weight": parse_layout("[@b, -]")})
    assert {label: str(layout) for label, layout in preset.states.items()} == {
        "w.weight": "[@b, -]",
        "adamw.exp_avg[w.weight]": "[@b, -]",
    }
    answer = find_layouts(graph, CPU, presets={"mine": preset})
    mine = next(each for each in answer.candidates if each.name == "mine")
    alone = compile_graph(preset.on(graph), report=True, cluster=CPU)
    assert mine.estimate == estimate(alone, CPU)


BOUND = """graph @step on mesh<a=2, b=2> {
  %x = input 0 : f32[64@a, 512]
  %w = state "w" : f32[512, 512@b]
  %v = state "v" : f32[512, 512]
  %h = aten.mm(%x, %w) : f32[64, 512]
  %c = constrain(%h, "[@b, @a]") : f32[64, 512]
  %y = aten.mm(%c, %v) : f32[64, 512]
  return %y
}"""


def test_what_the_user_says_stays() -> None:
    graph = parse_graph(BOUND)
    answer = find_layouts(graph, CPU, bound=frozenset(["w"]))
    for candidate in answer.candidates:
        laid = candidate.layouts.on(graph)
        types = {node.name: str(node.meta["type"]) for node in laid.placeholders}
        assert types["x"] == "f32[64@a, 512]" and types["w"] == "f32[512, 512@b]"
        assert [node.args[1] for node in laid.calls if node.name == "c"] == ["[@b, @a]"]
        assert "w" not in candidate.layouts.states and "c" not in candidate.layouts.values


def test_memory_that_is_short_is_sharded_or_computed_again() -> None:
    graph = training_step(["whole"] * 3)
    free = find_layouts(graph, CPU)
    assert free.chosen.estimate is not None
    limit = int(free.chosen.estimate.peak * 0.7)
    answer = find_layouts(graph, CPU, CompileOptions(memory_limit=limit))
    assert answer.chosen.estimate is not None and answer.chosen.estimate.peak <= limit
    assert answer.chosen.estimate.seconds >= free.chosen.estimate.seconds
    laid = answer.chosen.layouts.on(graph)
    plan = compile_graph(laid, answer.options, report=True, cluster=CPU)
    assert plan.costs["peak_bytes"] <= limit


def test_large_programs_are_limited_only_where_that_could_be_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = step_of(mlps(64, 1), Mesh.abstract(data=8), 1024, 64)
    free = find_layouts(graph, CPU)
    assert free.chosen.estimate is not None
    limit = int(free.chosen.estimate.peak * 1.2)
    limited: list[bool] = []

    def counted(graph: Graph, options: CompileOptions, **how: Any) -> Plan:
        limited.append(options.memory_limit is not None)
        return compile_graph(graph, options, **how)

    monkeypatch.setattr(find, "compile_graph", counted)
    every = find_layouts(graph, CPU, CompileOptions(memory_limit=limit))
    before = sum(limited)
    monkeypatch.setattr(find, "LARGE", 0)
    answer = find_layouts(graph, CPU, CompileOptions(memory_limit=limit))
    assert before > 0 and sum(limited) == before  # as written every worker takes the whole batch, and is no faster
    assert answer.chosen.estimate == every.chosen.estimate == free.chosen.estimate


def test_no_layouts_fit_says_how_much_is_missing() -> None:
    graph = training_step(["whole"] * 3)
    with pytest.raises(LayoutError, match=r"no layouts of 'step' that were found fit 4.0 KiB a worker") as error:
        find_layouts(graph, replace(CPU, memory=4096))
    assert "are missing" in error.value.hint and "would do" in error.value.hint


def test_a_solver_without_time_takes_the_usual_layouts() -> None:
    graph = training_step(["whole"] * 3)
    answer = find_layouts(graph, CPU, CompileOptions(), seconds=0.0)
    assert answer.chosen.estimate is not None
    assert all(
        each.estimate is not None and answer.chosen.estimate.seconds <= each.estimate.seconds
        for each in answer.candidates
    )


def test_graphs_with_loops_are_refused() -> None:
    text = """graph @step on mesh<a=2> {
      %x = input 0 : f32[64]
      %v = to_varying(%x, "a", 0) : f32[32] varying<a>
      return %v
    }"""
    with pytest.raises(MonarchError, match="layouts cannot be found for 'step', which has per-worker code"):
        find_layouts(parse_graph(text), CPU)


def test_layouts_of_nothing_change_nothing() -> None:
    graph = parse_graph(BOUND)
    assert str(FoundLayouts().on(graph)) == str(graph)


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints its version when it is made, before what a command prints as JSON."""
    find_layouts(parse_graph(BOUND), CPU)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""


def test_why_tells_what_was_found_from_what_the_user_said() -> None:
    graph = parse_graph(BOUND)
    answer = find_layouts(graph, CPU, bound=frozenset(["w"]))
    found = FoundLayouts({"v": parse_layout("[@a, -]")}, {}, {"h": parse_layout("[@a, -]")})
    plan = compile_graph(found.on(graph), report=True)
    assert "the layouts found give state 'v' the layout [@a, -]" in str(explain(plan, "v"))
    assert "the program gives state 'w' the layout [-, @b]" in str(explain(plan, "w"))
    assert "layout() at" not in str(explain(plan, "h"))
    assert answer.data["chosen"] == answer.chosen.name and answer.data["parameters"].keys() <= {"v"}
