"""Batch dims that PyTorch merges for a product stay apart where the lower of them is sharded: attention by hand is
computed in shards of heads, and its numbers are PyTorch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch.compiler import ops
from monarch.compiler.cost.work import graph_costs
from monarch.compiler.graph import Graph
from monarch.compiler.passes.batches import keep_all
from monarch.compiler.passes.decompose import DecomposeSplit
from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh, layout, program
from monarch.stdlib.models.llama import Llama
from tests.compiler.reference import run_reference
from tests.compiler.training import GPT

MESH = Mesh.abstract(data=2, model=2)
HEADS = [4, 4, 6, 8]
TURNED = [4, 6, 4, 8]
BY_HEADS, TURNED_BY_HEADS = ["data", "model", None, None], ["data", None, "model", None]


def baddbmm(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    found = torch.baddbmm(
        bias.reshape(16, 1, 6), q.reshape(16, 6, 8), k.reshape(16, 6, 8).transpose(1, 2), beta=0.5, alpha=0.3
    )
    return found.view(4, 4, 6, 6)


def disentangled(q: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """As DeBERTa's: two products, the second with positions that are the same in all rows, read where others say."""
    q3, k3 = q.reshape(-1, 6, 8), k.reshape(-1, 6, 8)
    scores = torch.bmm(q3, k3.transpose(-1, -2) / 2.0)
    at = (torch.arange(6)[:, None] - torch.arange(6)).clamp(0, 5)
    beside = torch.bmm(q3, p.repeat(4, 1, 1).transpose(-1, -2))
    scores = scores + torch.gather(beside, -1, at.expand(16, 6, 6))
    return torch.bmm(scores.softmax(-1), k3).view(4, 4, 6, 8)


def summed(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A merged value that another op reads too."""
    scores = torch.bmm(q.reshape(16, 6, 8), k.reshape(16, 6, 8).transpose(1, 2))
    return scores.view(4, 4, 6, 6) * 2 + torch.cat([scores, scores], 1).amax(1).view(4, 4, 1, 6)


CASES: dict[str, tuple[Callable[..., Any], Sequence[Sequence[int]], Sequence[Sequence[str | None]]]] = {
    "matmul": (lambda q, k: q @ k.transpose(-1, -2), [HEADS] * 2, [BY_HEADS] * 2),
    "matmul of 5 dims": (
        lambda q, k: q @ k.transpose(-1, -2),
        [[2, *HEADS]] * 2,
        [[None, *BY_HEADS]] * 2,
    ),
    "a broadcast matmul": (
        lambda q, w: q @ w,
        [HEADS, [4, 8, 5]],
        [BY_HEADS, ["model", None, None]],
    ),
    "einsum": (lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k), [TURNED] * 2, [TURNED_BY_HEADS] * 2),
    "einsum of three": (
        lambda q, k, v: torch.einsum("bhqd,bhkd,bhkv->bhqv", q, k, v),
        [HEADS] * 3,
        [BY_HEADS] * 3,
    ),
    "attention's math": (
        lambda q, k, v: torch.ops.aten._scaled_dot_product_attention_math(q, k, v, is_causal=True)[0],
        [HEADS] * 3,
        [BY_HEADS] * 3,
    ),
    "attention by hand": (
        lambda q, k, v: (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v,
        [HEADS] * 3,
        [BY_HEADS] * 3,
    ),
    "baddbmm": (baddbmm, [[4, 4, 1, 6], HEADS, HEADS], [BY_HEADS] * 3),
    "disentangled": (disentangled, [HEADS, HEADS, [4, 6, 8]], [BY_HEADS, BY_HEADS, ["model", None, None]]),
    "read merged too": (summed, [HEADS] * 2, [BY_HEADS] * 2),
    "cdist": (lambda q, k: torch.cdist(q, k), [HEADS] * 2, [BY_HEADS] * 2),
}


def traced(case: str) -> tuple[Graph, list[torch.Tensor], list[torch.Tensor]]:
    """The graph of a case with its gradients, its inputs, and what PyTorch makes of them."""
    function, shapes, layouts = CASES[case]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]

    def step(*inputs: torch.Tensor, place: Callable[..., torch.Tensor] = layout) -> list[torch.Tensor]:
        leaves = [place(x, at) for x, at in zip(inputs, layouts, strict=True)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        made = function(*leaves)
        return [made.detach(), *torch.autograd.grad((made * made).sum(), leaves)]

    return program(step, mesh=MESH).trace(*inputs).graph, inputs, step(*inputs, place=lambda x, at: x)


@pytest.mark.parametrize("case", CASES)
def test_heads_stay_sharded_through_products(case: str) -> None:
    graph, inputs, wanted = traced(case)
    partitioned = partition_graph(graph)
    moved = Counter(str(node.target) for node in partitioned.calls if ops.is_collective(node.target))
    # What is sharded over one mesh dim alone has a gradient that the other sums; nothing else moves.
    whole = sum(sum(entry is not None for entry in at) < 2 for at in CASES[case][2])
    assert moved == Counter(all_reduce=whole)
    for found, want in zip(run_reference(partitioned, dict(enumerate(inputs)))[0], wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_rows_that_views_have_merged_stay_one_dim() -> None:
    """A matrix beside them has no dim of theirs."""
    inputs = torch.randn(6, 2, 4), torch.randn(6, 8)
    made = program(lambda x, y: torch.einsum("tep,tw->epw", x, y), mesh=MESH).trace(*inputs).graph
    wanted = torch.einsum("tep,tw->epw", *inputs)
    found = run_reference(keep_all(made), dict(enumerate(inputs)))[0][0]
    torch.testing.assert_close(found, wanted)


def test_values_are_looked_up_by_an_index_that_views_have_merged() -> None:
    inputs = torch.randn(4, 6), torch.randperm(24).reshape(4, 6)
    step = program(lambda x, at: torch.take_along_dim(x, layout(at, [None, "model"])), mesh=MESH)
    found = run_reference(partition_graph(step.trace(*inputs).graph), dict(enumerate(inputs)))[0][0]
    torch.testing.assert_close(found, torch.take_along_dim(*inputs))


def linear(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 48, bias), nn.GELU(), nn.Linear(48, 64, bias))


_TOKENS, _ACTIVATION = 8 * 4 * 8, 4 * 4 * 8 * 32
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int] | None]] = {
    "linear layers": (lambda: linear(False), None),
    "linear layers with a bias": (lambda: linear(True), None),
    # The first layer's attention needs the tokens and its output's gradient, the second's its input and that.
    "gpt": (lambda: GPT(64, 32), {"count": 4, "tensors": 4, "bytes": _TOKENS + 3 * _ACTIVATION}),
    # Here the second layer's attention gathers queries, keys and values, of which there are as many as inputs.
    "llama": (
        lambda: Llama(vocabulary=64, width=32, layers=2, groups=2),
        {"count": 5, "tensors": 7, "bytes": _TOKENS + 4 * _ACTIVATION + _ACTIVATION // 32},
    ),
}
"""Models, and what training them gathers along a sequence of 8, with 4 rows of 32 numbers a token."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("family", MODELS)
def test_a_sharded_sequence_is_gathered_for_attention_alone(family: str, reduction: str) -> None:
    """Linear layers, norms and losses merge batch and sequence, and compute on blocks of the sequence."""
    torch.manual_seed(0)
    model = MODELS[family][0]()
    names = [name for name, _ in model.named_parameters()]
    inputs = [*torch.randint(0, 64, (2, 4, 8)), *(each.detach() for each in model.parameters())]
    inputs[1][1, 3:] = -100

    def step(*inputs: torch.Tensor, place: Callable[..., torch.Tensor] = layout) -> list[torch.Tensor]:
        tokens, targets = (place(x, [None, "model"]) for x in inputs[:2])
        leaves = [x.detach().requires_grad_() for x in inputs[2:]]
        logits = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (tokens,))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    partitioned = partition_graph(program(step, mesh=MESH).trace(*inputs).graph)
    returned = run_reference(partitioned, dict(enumerate(inputs)))[0]
    for found, want in zip(returned, step(*inputs, place=lambda x, at: x), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    moved = graph_costs(partitioned)["collectives"]["model"]
    gathered = moved.pop("all_gather", None)
    assert gathered == MODELS[family][1]
    assert moved.keys() == {"all_reduce"}


def test_a_program_without_sharded_heads_is_left_as_it_is() -> None:
    graph = traced("attention by hand")[0]
    for node in list(graph.calls):
        if node.target is ops.constrain:
            node.args = (node.args[0], node.args[1].replace("@model", "-"))
    before = str(graph)
    assert str(DecomposeSplit().run(graph, None)) == before  # type: ignore[arg-type]
