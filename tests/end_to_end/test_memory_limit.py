"""Training under a memory limit on real workers: the same bits, in the memory that was promised."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.errors import MonarchError
from monarch.compiler.plan import Plan
from monarch.compiler.schedule.arena import Placing
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel

pytestmark = pytest.mark.sample(1, of="kernels")


@dataclass
class Trained:
    """Three steps: the losses, the state after them, the plan, and the most that a worker was measured to hold."""

    losses: list[float]
    state: list[torch.Tensor]
    plan: Plan
    measured: int


def train(dims: dict[str, int], kind: str, memory_limit: int | str | None = None) -> Trained:
    torch.manual_seed(0)
    plain = GPT(width=32, layers=2, heads=4, sequence=64, vocabulary=64)
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


@pytest.mark.sample(1)
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


@pytest.mark.full
def test_the_same_bits_without_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as many bytes are measured: what lies in the arena counts as what it is."""
    placed = train({"data": 2}, "fully sharded")
    assert placed.plan.arena > 0
    monkeypatch.setattr(Placing, "run", lambda self: (0, list(self.schedule.instructions)))
    bare = train({"data": 2}, "fully sharded")
    assert bare.plan.arena == 0 and not any(step.regions for step in bare.plan.instructions)
    assert bare.losses == placed.losses and bare.measured == placed.measured
    assert all(torch.equal(a, b) for a, b in zip(bare.state, placed.state, strict=True))


def test_a_limit_that_cannot_be_kept_is_said_before_anything_runs() -> None:
    with Mesh(data=2) as mesh:
        weight = monarch.distribute(torch.randn(64, 64), mesh, "[-, -]")

        @monarch.program(memory_limit="16 KiB")
        def square(x: "f32[8@data, 64]") -> torch.Tensor:
            return x @ weight @ weight

        with pytest.raises(MonarchError) as caught:
            square(torch.randn(8, 64))
        assert "'square' does not fit in 16,384 bytes (16.0 KiB) a worker: it takes 19,456" in str(caught.value)
        assert "inputs 1.0 KiB, parameters 16.0 KiB, values of the step 2.0 KiB" in str(caught.value)

    with pytest.raises(MonarchError, match="memory_limit is 'plenty', not a number of bytes"):
        monarch.program(memory_limit="plenty")(lambda x: x)


def test_gradients_stay_where_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Mesh(data=2) as mesh:
        weight = monarch.distribute(torch.randn(4, 4), mesh, "[-, -]").requires_grad_(True)
        bias = monarch.distribute(torch.randn(4), mesh).requires_grad_(True)
        optimizer = torch.optim.SGD([weight, bias], lr=0.1)

        @monarch.program
        def step(x: "f32[8@data, 4]") -> torch.Tensor:
            optimizer.zero_grad()
            loss = (torch.dropout(x, 0.5, True) @ weight + bias).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        x = torch.randn(8, 4)
        for _ in range(3):
            step(x)

        def refuse(*arguments: object, **more: object) -> None:
            raise KeyboardInterrupt

        connection = type(mesh.executor.connection)  # type: ignore[attr-defined]
        before, random = weight.grad, torch.get_rng_state()  # the bias' gradient nobody else holds
        values = [tensor.full_tensor() for tensor in (weight, bias, before, bias.grad)]
        for what, name in ((type(mesh.executor), "run"), (connection, "enter"), (connection, "try_to_give")):
            with monkeypatch.context() as patch:
                patch.setattr(what, name, refuse)
                with pytest.raises(KeyboardInterrupt):
                    step(x)
            assert weight.grad is before and torch.equal(random, torch.get_rng_state())
            now = [tensor.full_tensor() for tensor in (weight, bias, weight.grad, bias.grad)]
            assert all(map(torch.equal, values, now))
        step(x)
        assert weight.grad is not before and torch.equal(before.full_tensor(), values[2])


def test_what_else_holds_a_gradient_keeps_its_value() -> None:
    with Mesh(data=2) as mesh:
        weights = [monarch.distribute(torch.full((4,), float(n)), mesh).requires_grad_(True) for n in range(4)]

        @monarch.program
        def step(x: torch.Tensor) -> torch.Tensor:
            for weight in weights:
                weight.grad = None
            loss = sum((weight * weight * x).sum() for weight in weights)
            loss.backward()
            return loss

        for _ in range(3):
            step(torch.ones(4))
        kept = [weights[0].grad, weights[1].grad[1:], weights[2].grad.detach()]
        step(torch.full((4,), 7.0))
        assert [each.full_tensor()[0].item() for each in (*kept, weights[3].grad)] == [0, 2, 4, 42]
