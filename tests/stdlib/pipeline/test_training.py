"""What a training loop does besides the step of a pipeline, against the same loop on the model without stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import monarch
from monarch.compiler.errors import ProgramError
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh

Optimizer = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def check(
    model: nn.Module,
    optimizer: Optimizer = momentum,
    clip: float = 0.0,
    averages: bool = False,
    schedule: str = "1f1b",
    virtual: int = 1,
    steps: int = 2,
) -> None:
    dense = copy.deepcopy(model)
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(model, mesh, microbatches=4, schedule=schedule, virtual=virtual, layouts={})
        ours, theirs = optimizer([*pipe.parameters()]), optimizer([*dense.parameters()])
        ema = swa_utils.get_ema_multi_avg_fn(0.9)
        average, wanted_average = (swa_utils.AveragedModel(each, multi_avg_fn=ema) for each in (pipe.model, dense))
        norms = []

        @monarch.program
        def step(x: Any, y: Any) -> Any:
            ours.zero_grad()
            pipe.step(x, target=y, loss_fn=F.mse_loss)
            norm = pipe.clip_grad_norm_(clip) if clip else None
            ours.step()
            if averages:
                average.update_parameters(pipe.model)
            return norm

        for _ in range(steps):
            x, y = torch.randn(2, 8, 6)
            norms.append(step(x, y))
            theirs.zero_grad()
            F.mse_loss(dense(x), y).backward()
            if clip:
                torch.testing.assert_close(
                    norms[-1].full_tensor(), nn.utils.clip_grad_norm_(dense.parameters(), clip).detach()
                )
            theirs.step()
            if averages:
                wanted_average.update_parameters(dense)
        for found, wanted in [(pipe.model, dense)] + [(average, wanted_average)] * averages:
            for name, value in wanted.state_dict().items():
                torch.testing.assert_close(found.state_dict()[name].full_tensor(), value, msg=name)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2)])
def test_gradients_of_all_stages_are_clipped_as_one_vector(schedule: str, virtual: int) -> None:
    check(Blocks(), clip=0.05, schedule=schedule, virtual=virtual)


def test_weights_of_several_meshes_are_averaged() -> None:
    check(Blocks(), averages=True)


def test_a_copied_pipeline_is_in_the_same_stages_and_an_average_of_it_is_one() -> None:
    x = torch.randn(8, 6)
    with partitioned_mesh(pipe=2) as mesh:
        model = Blocks()
        pipe = pipeline(copy.deepcopy(model), mesh, microbatches=2, layouts={})
        average = swa_utils.AveragedModel(pipe)
        assert [*average.module.stages.enters.values()] == [*pipe.stages.enters.values()]
        assert set(average.module.stages.enters) < set(average.modules())
        step = monarch.program(lambda x: average.module.step(x, target=x, loss_fn=F.mse_loss))
        torch.testing.assert_close(step(x).full_tensor(), F.mse_loss(model(x), x).detach())


def test_steps_by_lists_of_tensors_and_counters_made_with_the_optimizer() -> None:
    check(Blocks(), lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.1))


@pytest.mark.parametrize("foreach", [True, False])
def test_steps_by_numbers_that_are_counted_on_each_mesh(foreach: bool) -> None:
    check(Blocks(), lambda parameters: torch.optim.ASGD(parameters, lr=0.1, lambd=0.1, t0=1, foreach=foreach), steps=4)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_steps_where_the_gradients_of_all_stages_are_finite(fused: bool) -> None:
    def scaled(model: nn.Module, parameters: Any, gradients: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        found = []
        for number in range(5):
            optimizer.zero_grad()
            # the bias of the last stage only has a gradient that is not finite, or that of the first only, or none
            at = {1: "blocks.3.0.bias", 3: "blocks.0.0.bias"}.get(number)
            x, y = torch.full((4, 6), 0.5 + number), torch.zeros(4, 6)
            gradients(scaler, x, y)
            if at is not None:
                model.get_parameter(at).grad.mul_(float("inf"))  # type: ignore[union-attr]
            if number == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            values = [getattr(each, "full_tensor", each.detach)().clone() for each in model.parameters()]
            found.append((scaler.get_scale(), values))
        return found

    model = Blocks()
    dense = copy.deepcopy(model)

    def backward(scaler: Any, x: Any, y: Any) -> None:
        scaler.scale(F.mse_loss(dense(x), y)).backward()

    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(model, mesh, microbatches=2, layouts={})

        @monarch.program
        def step(scaler: Any, x: Any, y: Any) -> Any:
            return pipe.step(x, target=y, loss_fn=lambda output, y: scaler.scale(F.mse_loss(output, y)))

        found = scaled(model, pipe.parameters(), step)
        wanted = scaled(dense, dense.parameters(), backward)
    assert [scale for scale, _ in found] == [8.0, 4.0, 4.0, 2.0, 2.0]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_blocks_that_are_computed_again_in_the_backward_pass(schedule: str) -> None:
    check(Blocks(checkpointed=True), schedule=schedule)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.head(self.recurrent(x)[0])


def test_a_recurrent_layer_asks_for_mixes_rows_and_trains_with_it() -> None:
    dense, (x, y) = Recurrent(), torch.randn(2, 8, 3, 6)
    wanted = F.mse_loss(dense(x), y)
    with partitioned_mesh(pipe=2) as mesh:
        for mixes in (False, True):
            model = copy.deepcopy(dense)
            pipe = pipeline(model, mesh, microbatches=2, split_at=["head"], layouts={}, mixes_rows=mixes)

            @monarch.program
            def step(x: Any, y: Any, pipe: Any = pipe) -> Any:
                return pipe.step(x, target=y, loss_fn=F.mse_loss)

            if mixes:
                torch.testing.assert_close(step(x, y).full_tensor(), wanted.detach())
            else:
                with pytest.raises(ProgramError, match="mixes_rows=True"):
                    step(x, y)


def test_hooks_of_gradients_see_those_of_the_whole_batch() -> None:
    model = Blocks()

    def scale(parameter: Any) -> None:
        parameter.grad.mul_(parameter.grad.abs())

    def hook(model: Any) -> None:
        first, last = model.blocks[0][0].weight, model.blocks[3][0].bias
        first.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        last.register_post_accumulate_grad_hook(scale)

    dense = copy.deepcopy(model)
    hook(dense)
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(model, mesh, microbatches=4, layouts={})
        hook(model)

        @monarch.program
        def step(x: Any, y: Any) -> Any:
            return pipe.step(x, target=y, loss_fn=F.mse_loss)

        for _ in range(2):  # the second adds to the gradients of the first
            x, y = torch.randn(2, 8, 6)
            step(x, y)
            F.mse_loss(dense(x), y).backward()
            for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


def test_a_mean_by_weights_that_nearly_adds_up_is_that_of_the_batch() -> None:
    def loss_fn(output: Any, target: Any) -> Any:
        return ((output - target["y"]).square().mean(1) * target["by"]).sum() / target["by"].sum()

    dense = Blocks()
    x, target = torch.randn(7, 6), {"y": torch.randn(7, 6), "by": torch.rand(7)}
    wanted = loss_fn(dense(x), target)
    for dtype in (torch.float32, torch.bfloat16):
        with partitioned_mesh(pipe=2) as mesh:
            pipe = pipeline(copy.deepcopy(dense).to(dtype), mesh, microbatches=3, layouts={})

            @monarch.program
            def step(x: Any, target: Any, pipe: Any = pipe) -> Any:
                return pipe.step(x, target=target, loss_fn=loss_fn)

            given = {name: each.to(dtype) for name, each in target.items()}
            if dtype == torch.float32:
                torch.testing.assert_close(step(x, target).full_tensor(), wanted.detach())
            facts = step.trace(x.to(dtype), given).graph.schedule
            assert facts["barriers"] == [[1, "loss_fn"]]  # where all microbatches wait for one another
