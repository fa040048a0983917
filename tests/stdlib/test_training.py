"""The GPT trained on real workers, under each of the layouts, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.types import Layout
from monarch.distributed import Mesh
from monarch.stdlib.data import batches, corpus
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel

STEPS = 4

PRESETS: dict[str, Callable[[GPT, Mesh], dict[str, Layout]]] = {
    "data_parallel": lambda model, mesh: data_parallel(model),
    "fully_shard": lambda model, mesh: fully_shard(model, mesh, "data"),
    "tensor_parallel": lambda model, mesh: tensor_parallel(model, mesh, "model"),
    "both": lambda model, mesh: combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data")),
}


def small() -> GPT:
    torch.manual_seed(0)
    return GPT(width=32, layers=2, heads=4, sequence=16)


def optimize(model: GPT) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return batches(corpus(50_000), batch=4, sequence=16, steps=STEPS)


def plainly() -> tuple[list[float], GPT]:
    model = small()
    optimizer, scheduler = optimize(model)
    losses = []
    for tokens, targets in data():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, model


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, model=2) as mesh:
        yield mesh


def annotated(model: GPT, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    @monarch.program
    def train_step(tokens: "i64[4@data, 16]", targets: "i64[4@data, 16]") -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def laid_out(model: GPT, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    @monarch.program
    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        tokens, targets = monarch.layout(tokens, "[@data, -]"), monarch.layout(targets, "[@data, -]")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [annotated, laid_out])
@pytest.mark.parametrize("preset", PRESETS)
def test_training_under_each_layout_is_plain_training(
    mesh: Mesh, preset: str, program: Callable[..., Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
) -> None:
    model = small()
    model = monarch.module_to_mesh(model, mesh, layouts=PRESETS[preset](model, mesh))
    optimizer, scheduler = optimize(model)
    train_step = program(model, optimizer)

    losses = []
    for tokens, targets in data():
        losses.append(train_step(tokens, targets))
        scheduler.step()

    expected_losses, expected = plainly()
    assert [loss.item() for loss in losses] == pytest.approx(expected_losses, abs=2e-6)
    trained = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(trained, dict(expected.named_parameters()), atol=2e-5, rtol=1e-4)
