"""A GPT in two stages of two workers each trains in two microbatches, with every schedule, as the GPT without stages.

python examples/pipeline_gpt.py [STEPS]
"""

import copy
import sys
from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.pipeline import pipeline

Tokens = Annotated[torch.Tensor, "i64[16@data, 12]"]
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
torch.manual_seed(0)
gpt = GPT(vocabulary=16, width=16, layers=4, heads=2, sequence=12)
tokens = torch.randint(0, 16, (16, 1)) + torch.arange(13)  # each row counts upwards
x, y = tokens[:, :-1] % 16, tokens[:, 1:] % 16


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_whole(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss_fn(model(x), y))
        losses[-1].backward()
        optimizer.step()
    return losses[-1].item()


def train_pipelined(model, mesh, **options):
    pipe = pipeline(model, mesh, microbatches=2, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)

    @monarch.program
    def step(x: Tokens, y: Tokens):
        optimizer.zero_grad()
        loss = pipe.step(x, target=y, loss_fn=loss_fn)
        optimizer.step()
        return loss

    losses = [step(x, y) for _ in range(STEPS)]
    return losses[-1].item(), pipe.timetable


print(f"{'whole':<12} loss {train_whole(copy.deepcopy(gpt)):.4f}")
with Mesh(pipe=2, data=2) as mesh:
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        loss, timetable = train_pipelined(copy.deepcopy(gpt), mesh, schedule=schedule)
        print(f"{schedule:<12} loss {loss:.4f}, {timetable.bubble:.1%} bubble")
