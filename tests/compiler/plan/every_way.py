"""Writes plans of a training step, compiled in several ways, into the folder that it is given: what one process
compiles, for others to be compared with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.file import save_plan
from monarch.compiler.plan.options import CompileOptions
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel
from tests.sample import is_full


def traced() -> Graph:
    """A GPT's training step, nested: it has values of equal size and cost in plenty, among which passes have to
    choose."""
    mesh = Mesh.abstract(data=2, model=2)
    plain = GPT(width=32, layers=2, heads=4, sequence=64, vocabulary=64)
    layouts = combine(tensor_parallel(plain, mesh, "model"), fully_shard(plain, mesh, "data"))
    model = monarch.module_to_mesh(plain, mesh, layouts=layouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @monarch.program
    def train_step(tokens: "i64[16@data, 64]", targets: "i64[16@data, 64]") -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return train_step.trace(torch.zeros(16, 64, dtype=torch.int64), torch.zeros(16, 64, dtype=torch.int64)).graph


def plans(graph: Graph) -> Iterator[tuple[str, Plan]]:
    """Plans of one graph, each with the name of how it was compiled."""
    for kernels in ("off", "all") if is_full() else ("all",):
        free = compile_graph(graph, CompileOptions(kernels=kernels), report=True)
        yield f"kernels {kernels}", free
        assert free.report is not None
        before = sum(value.allocates for value in free.report.values if value.instruction < 0)
        limit = (before + free.costs["peak_bytes"]) // 2
        limited = compile_graph(graph, CompileOptions(kernels=kernels, memory_limit=limit))
        yield f"kernels {kernels} in half the memory", limited
    if is_full():
        yield "for a GPU", compile_graph(graph, CompileOptions(target="cuda:90", kernels="all", collectives="nccl"))


def main(folder: Path) -> None:
    for how, plan in plans(traced()):
        # How long each pass took is the one thing that differs.
        save_plan(replace(plan, costs={**plan.costs, "seconds": {}}), folder / f"{how}.mplan")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
