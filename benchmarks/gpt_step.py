"""A GPT's training step as one worker's program, in bfloat16, for `benchmarks.gpu`, which loads it without workers.
GPT_STEP has the sizes: width, layers, heads, sequence, vocabulary, batch."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

import monarch
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT

WIDTH, LAYERS, HEADS, SEQUENCE, VOCABULARY, BATCH = map(int, os.environ["GPT_STEP"].split(","))
RATE, DECAY = 1e-3, 0.1


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS, sequence=SEQUENCE).bfloat16()


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


mesh = Mesh.abstract(data=1)
model = monarch.module_to_mesh(make_model(), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


@monarch.program
def step(tokens, targets):  # type: ignore[no-untyped-def]
    optimizer.zero_grad()
    loss = loss_of(model, tokens, targets)
    loss.backward()
    optimizer.step()
    return loss
