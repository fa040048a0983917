"""The same training step under each choice of layouts, through the language and on real workers, beside plain
PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.cost.work import graph_costs
from monarch.compiler.types import Layout
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel

BATCH, SEQUENCE, WIDTH, LAYERS = 4, 32, 64, 2
Presets = Callable[[nn.Module, Mesh], Mapping[str, Layout]]


@dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    presets: Presets
    tokens: str = "i64[4@data, 32]"
    activations: str = ""


CASES = {
    "data parallel": Case({"data": 2}, lambda m, mesh: data_parallel(m)),
    "fully sharded": Case({"data": 2}, lambda m, mesh: fully_shard(m, mesh, "data")),
    "tensor parallel": Case({"model": 2}, lambda m, mesh: tensor_parallel(m, mesh, "model"), "i64[4, 32]"),
    "sequence sharded": Case(
        {"model": 2}, lambda m, mesh: tensor_parallel(m, mesh, "model"), "i64[4, 32]", "[-, @model, -]"
    ),
    "data and tensor parallel": Case({"data": 2, "model": 2}, lambda m, mesh: tensor_parallel(m, mesh, "model")),
    "fully sharded in tensor parallel": Case(
        {"data": 2, "model": 2},
        lambda m, mesh: combine(tensor_parallel(m, mesh, "model"), fully_shard(m, mesh, "data")),
    ),
    "all of it": Case(
        {"data": 2, "model": 2},
        lambda m, mesh: combine(tensor_parallel(m, mesh, "model"), fully_shard(m, mesh, "data")),
        activations="[@data, @model, -]",
    ),
}


def logits(model: GPT, tokens: torch.Tensor, activations: str) -> torch.Tensor:
    """The model's forward pass, with the residual stream laid out as `activations` says."""

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        return monarch.layout(x, activations) if activations else x

    x = laid_out(model.embedding(tokens) + model.positions[: tokens.shape[1]])
    for block in model.blocks:
        x = x + laid_out(block.attention(block.attention_norm(x)))
        x = x + laid_out(block.mlp(block.mlp_norm(x)))
    return model.head(model.norm(x))


def step_of(model: GPT, optimizer: torch.optim.Optimizer, activations: str = "") -> Callable[..., torch.Tensor]:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(model, tokens, activations).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_numbers_of_plain_pytorch(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    dense = GPT(width=WIDTH, layers=LAYERS, sequence=SEQUENCE)
    model = copy.deepcopy(dense)
    with Mesh(**case.mesh) as mesh:
        model = monarch.module_to_mesh(model, mesh, layouts=case.presets(model, mesh))
        before = {n: p.sharding for n, p in model.named_parameters()}
        ours = step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3), case.activations)
        ours.__annotations__ = dict.fromkeys(("tokens", "targets"), case.tokens)
        program = monarch.program(ours)
        plain = step_of(dense, torch.optim.AdamW(dense.parameters(), lr=1e-3))
        for _ in range(4):
            tokens, targets = torch.randint(0, 256, (2, BATCH, SEQUENCE))
            torch.testing.assert_close(program(tokens, targets).full_tensor(), plain(tokens, targets).detach())
        for (n, p), expected in zip(model.named_parameters(), dense.parameters(), strict=True):
            assert p.sharding == before[n]
            torch.testing.assert_close(
                p.full_tensor(), expected.detach(), rtol=1e-3, atol=1e-4, msg=lambda m, n=n: f"{n}: {m}"
            )


def test_sequence_sharded_activations_are_gathered_and_scattered_once_a_half_block_each_way() -> None:
    case = CASES["sequence sharded"]
    model = GPT(width=WIDTH, layers=LAYERS, sequence=SEQUENCE)
    mesh = Mesh.abstract(**case.mesh)
    model = monarch.module_to_mesh(model, mesh, layouts=case.presets(model, mesh))
    program = monarch.program(step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), case.activations))
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    moved = graph_costs(program.trace(tokens, tokens).partition().graph)["collectives"]["model"]
    activation = 4 * BATCH * SEQUENCE * WIDTH
    halves = 2 * 2 * LAYERS  # attention and MLP, forward and backward
    assert moved["reduce_scatter"] == {"count": halves, "tensors": halves, "bytes": halves * activation}
    # And once more for the gradient of the positions, which are whole. The head, which is too, computes on blocks.
    assert moved["all_gather"]["count"] == halves + 1
    assert moved["all_gather"]["bytes"] == halves * activation + 4 * SEQUENCE * WIDTH
    # The loss, and what every worker has of the norms', the head's and the embedding's gradients: one bucket.
    assert moved["all_reduce"]["count"] == 2
