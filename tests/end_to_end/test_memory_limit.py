"""Training under a memory limit on real workers: the same bits, in the memory that was promised."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.plan import Plan
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel


@dataclass
class Trained:
    """Three steps: the losses, the state after them, the plan, and the most that a worker was measured to hold."""

    losses: list[float]
    state: list[torch.Tensor]
    plan: Plan
    measured: int


def train(dims: dict[str, int], kind: str, memory_limit: int | str | None = None) -> Trained:
    torch.manual_seed(0)
    plain = GPT(width=32, layers=3, heads=4, sequence=64, vocabulary=64)
    tokens, targets = torch.randint(64, (16, 64)), torch.randint(64, (16, 64))
    with Mesh(**dims) as mesh:
        layouts = {
            "data": lambda: data_parallel(plain),
            "fully sharded": lambda: fully_shard(plain, mesh, "data"),
            "nested": lambda: combine(tensor_parallel(plain, mesh, "model"), fully_shard(plain, mesh, "data")),
        }[kind]()
        model = monarch.module_to_mesh(plain, mesh, layouts=layouts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        @monarch.program(memory_limit=memory_limit)
        def train_step(tokens: "i64[16@data, 64]", targets: "i64[16@data, 64]") -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

        losses = [train_step(tokens, targets).item() for _ in range(3)]
        with monarch.profile() as profile:
            losses.append(train_step(tokens, targets).item())
        plan = train_step.compile(tokens, targets)
        steps = [step for step in profile.traces[0].steps if step.worker == mesh.size() - 1]
        held = max(span.held for step in steps for span in step.spans)
        state = [
            value.full_tensor()
            for parameter in model.parameters()
            for value in (parameter, parameter.grad, *optimizer.state[parameter].values())
        ]
        return Trained(losses, state, plan, held)


@pytest.mark.parametrize(
    ("kind", "dims"),
    [("data", {"data": 2}), ("fully sharded", {"data": 2}), ("nested", {"data": 2, "model": 2})],
)
def test_the_same_bits_in_the_promised_memory(kind: str, dims: dict[str, int]) -> None:
    free = train(dims, kind)
    assert free.plan.report is not None
    before = sum(value.allocates for value in free.plan.report.values if value.instruction < 0)
    assert free.measured == free.plan.costs["peak_bytes"]

    limit = before + (free.measured - before) * 2 // 3
    limited = train(dims, kind, limit)
    assert limited.losses == free.losses
    assert all(torch.equal(a, b) for a, b in zip(limited.state, free.state, strict=True))
    assert limited.measured == limited.plan.costs["peak_bytes"] <= limit < free.measured
    assert limited.plan.costs["recomputed"]["calls"] > 0
    assert limited.plan.costs["recomputed"]["without"] > limit
