"""Sequences over a context mesh dim: each worker has a block of time, and attention goes around a ring of workers."""

from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.stdlib.context import context_parallel
from monarch.stdlib.models.llama import Llama

torch.manual_seed(0)
mesh = Mesh(data=2, context=2)
TIME = 64
SIZES = {"vocabulary": 64, "width": 32, "inner": 48, "layers": 2, "heads": 4, "groups": 2}
Ids = Annotated[torch.Tensor, f"i64[4@data, {TIME}@context]"]


def loss_of(model):
    def losses(tokens, targets, positions, mask=None):  # each worker calls it with its block of time
        logits = model(tokens, positions, mask).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)

    return losses


dense = Llama(**SIZES)
model = Llama(**SIZES)
model.load_state_dict(dense.state_dict())
model = monarch.module_to_mesh(model, mesh)
losses = context_parallel(loss_of(model), "context", method="ring")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


@monarch.program
def step(tokens: Ids, targets: Ids, documents: Ids):
    optimizer.zero_grad()
    loss = losses(tokens, targets, documents=documents).mean()
    loss.backward()
    optimizer.step()
    return loss


tokens = torch.randint(64, (10, 4, TIME))
documents = (torch.rand(10, 4, TIME) < 0.05).cumsum(-1)  # several in a row, which do not see each other
plain = torch.optim.AdamW(dense.parameters(), lr=0.01)
for number, (x, ids) in enumerate(zip(tokens, documents, strict=True)):
    loss = step(x, x.roll(-1, 1), ids)
    mask = torch.ones(TIME, TIME, dtype=torch.bool).tril() & (ids[:, None, :, None] == ids[:, None, None, :])
    expected = loss_of(dense)(x, x.roll(-1, 1), torch.arange(TIME)[None], mask).mean()
    plain.zero_grad()
    expected.backward()
    plain.step()
    if number in (0, 4, 9):
        print(f"step {number + 1}: loss {loss.item():.4f}, plain PyTorch's {expected.item():.4f}")
