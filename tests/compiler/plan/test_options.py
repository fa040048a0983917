"""How a program is compiled: one value, checked when it is made, from `@monarch.program` to the plan's file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.errors import MonarchError
from monarch.compiler.pipeline import compile_graph, graph_after
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph

LIMIT = 1 << 20
GRAPH = """graph @f on mesh<data=2> {
  %x = input 0                    : f32[64@data, 64]
  %y = aten.mul.Tensor(%x, 2.0)   : f32[64@data, 64]
  %z = aten.add.Tensor(%y, 1.0)   : f32[64@data, 64]
  return %z
}"""


def traced(**options: Any) -> Any:
    mesh = monarch.Mesh([2], ["data"])
    return monarch.program(lambda x: x * 2 + 1, mesh=mesh, **options).trace(torch.ones(64, 64))


def test_every_way_to_a_plan_keeps_all_options() -> None:
    asked: dict[str, Any] = {
        "target": "cuda:90",
        "memory_limit": "1 MiB",
        "rounding": "chain",
        "collectives": "nccl",
        "cuda_graphs": True,
    }
    options = CompileOptions("cuda:90", LIMIT, "chain", "nccl", True)
    graph = traced(**asked)
    assert graph.options == graph.partition().options == options
    assert graph.compile().options == graph.partition().compile().options == options


def test_a_partitioned_program_is_compiled_within_its_limit() -> None:
    with pytest.raises(MonarchError, match="does not fit in 1,000 bytes"):
        traced(memory_limit=1000).partition().compile()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounding": "twice"}, "rounding='twice'\n  it is 'eager' (after every op) or 'chain' (once a kernel)."),
        ({"cuda_graphs": 1}, "cuda_graphs='1'\n  it is True or False."),
        ({"target": "cuda:91"}, "unknown target 'cuda:91'"),
        ({"collectives": "glo"}, "unknown collectives 'glo'"),
        ({"memory_limit": 0}, "memory_limit is 0, and has to be at least one byte"),
        ({"kernels": "some"}, "kernels='some'\n  it is 'auto', 'all' or 'off'."),
    ],
)
def test_values_that_an_option_does_not_have(given: dict[str, Any], message: str) -> None:
    with pytest.raises(MonarchError) as raised:
        CompileOptions(**given)
    assert str(raised.value).startswith(message)


def test_options_that_do_not_go_together_are_known_once_the_target_is() -> None:
    for given in ({"collectives": "nccl"}, {"cuda_graphs": True}):
        options = CompileOptions(**given)
        with pytest.raises(MonarchError, match="the plan is for cpu"):
            options.check()
        with pytest.raises(MonarchError, match="the plan is for cpu"):
            compile_graph(parse_graph(GRAPH), options)


def test_a_plans_file_has_all_options() -> None:
    for options in (CompileOptions(), CompileOptions(memory_limit=LIMIT, rounding="chain", strict=True, kernels="all")):
        plan = compile_graph(parse_graph(GRAPH), options, report=True)
        assert plan_from_bytes(plan_bytes(plan)).options == options


def test_the_graph_after_a_pass_is_that_of_the_plan() -> None:
    graph = parse_graph(GRAPH)
    for kernels, times in (("all", 1), ("off", 0)):
        options = CompileOptions(kernels=kernels)
        assert str(graph_after(graph, "fuse-kernels", options)).count("= kernel(") == times
        assert str(graph_after(graph, "fuse-kernels", options)) == compile_graph(graph, options).graph
