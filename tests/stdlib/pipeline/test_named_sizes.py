"""Pipelines of named sizes: one plan for all their values, and the numbers of the model without stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import PerformanceWarning
from monarch.stdlib.pipeline import pipeline
from tests.language import partitioned
from tests.language.partitioned import partitioned_mesh

WORDS = 11


class Mixing(nn.Module):
    """Attention over the words of a row, and what the whole batch has in common."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, 8), nn.Embedding(32, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        heads = self.first(x)[:, None]
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if isinstance(self.norm, nn.BatchNorm1d) else self.norm(x)
        return self.head(torch.tanh(self.second(x)))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3)


def check(sizes: Sequence[tuple[int, int]], annotated: Callable[[Any], Any], batch_norm: bool = False) -> int:
    """Train by batches of these rows and lengths; gives how often the step was compiled."""
    torch.manual_seed(0)
    model = Mixing(batch_norm)
    dense = copy.deepcopy(model)
    with partitioned_mesh(pipe=2, data=2) as mesh:
        pipe = pipeline(model, mesh, microbatches=4, split_at=["second"])
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, dense))

        def train(tokens: Any, targets: Any) -> Any:
            ours.zero_grad()
            loss = pipe.step(tokens, target=targets, loss_fn=cross_entropy)
            ours.step()
            return loss

        step = monarch.program(annotated(train))
        partitioned.COMPILED.clear()
        for rows, length in sizes:
            tokens, targets = torch.randint(0, WORDS, (2, rows, length))
            theirs.zero_grad()
            wanted = cross_entropy(dense(tokens), targets)
            wanted.backward()
            theirs.step()
            torch.testing.assert_close(step(tokens, targets).full_tensor(), wanted.detach())
        for name, value in dense.state_dict().items():
            torch.testing.assert_close(pipe.model.state_dict()[name].full_tensor(), value, msg=name)
        return len(partitioned.COMPILED)


def annotated(text: str) -> Callable[[Any], Any]:
    def annotate(function: Any) -> Any:
        function.__annotations__ = {"tokens": text, "targets": text}
        return function

    return annotate


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "sizes", "batch_norm"),
    [
        ("i64[8@data, t]", [(8, 6), (8, 9), (8, 3), (8, 12)], False),
        ("i64[8@data, t]", [(8, 6), (8, 9), (8, 3), (8, 12)], True),
        ("i64[b@data, 6]", [(40, 6), (16, 6), (48, 6), (32, 6)], False),
        ("i64[b@data, t]", [(40, 6), (16, 9), (48, 7), (32, 5)], True),
    ],
)
def test_one_plan_serves_every_size(text: str, sizes: list[tuple[int, int]], batch_norm: bool) -> None:
    assert check(sizes, annotated(text), batch_norm) == 1


@pytest.mark.full
def test_a_batch_that_microbatches_do_not_divide_is_compiled_for() -> None:
    with pytest.warns(PerformanceWarning, match="4 microbatches do not divide the 10 rows"):
        assert check([(10, 6), (8, 6), (16, 6)], annotated("i64[b@data, 6]")) == 1
