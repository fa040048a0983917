"""Programs whose plans the inspector's tests look at: a GPT's training step, laid out in several ways."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.options import CompileOptions
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel
from tests.sample import is_full

KINDS = ("data", "tensor", "fully sharded", "nested") if is_full() else ("data", "nested")


def training_step(mesh: Mesh, kind: str) -> tuple[Any, Any]:
    """A GPT's training step with AdamW, and its arguments."""
    torch.manual_seed(0)
    model = GPT(width=32, layers=2, heads=4, sequence=16, vocabulary=64)
    layouts = {
        "data": lambda: data_parallel(model),
        "tensor": lambda: tensor_parallel(model, mesh, "model"),
        "fully sharded": lambda: fully_shard(model, mesh, "data"),
        "nested": lambda: combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data")),
    }[kind]()
    model = monarch.module_to_mesh(model, mesh, layouts=layouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @monarch.program
    def train_step(tokens: "i64[4@data, 16]", targets: "i64[4@data, 16]") -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return train_step, (torch.randint(64, (4, 16)), torch.randint(64, (4, 16)))


@cache
def training_plan(kind: str, kernels: str = "off") -> Plan:
    """The plan of `training_step`, with its report, on a mesh without workers; with generated kernels for "all"."""
    step, arguments = training_step(Mesh.abstract(data=2, model=2), kind)
    return compile_graph(step.trace(*arguments).graph, CompileOptions(kernels=kernels), report=True)


@cache
def megatron() -> Plan:
    """A column layer and a row layer, and a layout() line."""
    mesh = Mesh.abstract(data=4, model=2)
    up = monarch.distribute(torch.randn(64, 256), mesh, "[-, @model]")
    down = monarch.distribute(torch.randn(256, 64), mesh, "[@model, -]")

    @monarch.program
    def mlp(x: "f32[8, 64]") -> torch.Tensor:
        x = monarch.layout(x, "[@data, -]")
        hidden = torch.relu(x @ up)
        return hidden @ down + x

    plan: Plan = mlp.compile(torch.randn(8, 64))
    return plan


@cache
def laid_out() -> Plan:
    """layout() lines where the value lay so already: of an input, and of a result."""
    mesh = Mesh.abstract(data=4, model=2)
    up = monarch.distribute(torch.randn(64, 256), mesh, "[-, @model]")
    down = monarch.distribute(torch.randn(256, 64), mesh, "[@model, -]")

    @monarch.program
    def mlp(x: "f32[8@data, 64]") -> torch.Tensor:
        x = monarch.layout(x, "[@data, -]")
        hidden = torch.relu(x @ up)
        hidden = monarch.layout(hidden, "[@data, @model]")
        return hidden @ down

    plan: Plan = mlp.compile(torch.randn(8, 64))
    return plan
