"""The compiled form of a training loop: traced once, then one command to the workers a step.

Without running it: monarchc inspect examples/compiled_training.py:train_step --mesh data=16
"""

from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.stdlib.data import batches, corpus
from monarch.stdlib.models.gpt import GPT

torch.manual_seed(0)
mesh = Mesh(data=4)
model = monarch.module_to_mesh(GPT(width=64, layers=2), mesh)  # each parameter sharded over data
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
Tokens = Annotated[torch.Tensor, "i64[16@data, 128]"]


@monarch.program
def train_step(tokens: Tokens, targets: Tokens):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss


if __name__ == "__main__":
    losses = []
    for tokens, targets in batches(corpus(1 << 20), batch=16, sequence=128, steps=20):
        losses.append(train_step(tokens, targets))  # returns at once; one command to the workers
    print(f"loss {losses[0].item():.4f} at first, {losses[-1].item():.4f} after {len(losses)} steps")
