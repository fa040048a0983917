"""Batch dims that PyTorch merges for a product stay apart where the lower of them is sharded: attention by hand is
computed in shards of heads, and its numbers are PyTorch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from monarch.compiler import ops
from monarch.compiler.graph import Graph
from monarch.compiler.passes.batches import keep_all
from monarch.compiler.passes.decompose import DecomposeSplit
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.reference import run_reference
from monarch.language import Mesh, layout, program

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


def test_a_program_without_sharded_heads_is_left_as_it_is() -> None:
    graph = traced("attention by hand")[0]
    for node in list(graph.calls):
        if node.target is ops.constrain:
            node.args = (node.args[0], node.args[1].replace("@model", "-"))
    before = str(graph)
    assert str(DecomposeSplit().run(graph, None)) == before  # type: ignore[arg-type]
