"""A plan runs on the workers that it was compiled for, and on no others."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import MeshSpec, PlanError
from monarch.compiler.text import parse_graph
from monarch.runtime.controller import MeshExecutor

TEXT = """graph @double on mesh<data=2> {
  %x = input 0 : f32[4@data]
  %y = aten.add.Tensor(%x, %x) : f32[4]
  return %y
}"""


def test_a_plan_for_another_target_is_refused() -> None:
    graph = parse_graph(TEXT)
    executor = MeshExecutor(MeshSpec.of(data=2))
    try:
        with pytest.raises(PlanError) as caught:
            executor.run(compile_graph(graph, target="gfx942"), [torch.ones(4)])
        assert str(caught.value) == (
            "plan 'double' is compiled for gfx942, and the workers of this mesh run cpu\n"
            "  compile it for cpu, or run it where there are workers for gfx942."
        )
        (handle,) = executor.run(compile_graph(graph, report=True), [torch.ones(4)])
        assert torch.equal(executor.shards(handle)[0], torch.full((2,), 2.0))
    finally:
        executor.close()
