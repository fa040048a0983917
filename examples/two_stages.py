"""One program over two meshes: the stages of a model train on workers of their own, and a skip connection goes past the
second, all with one optimizer and one backward pass."""

from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch import Mesh
from torch import nn

torch.manual_seed(0)
root = Mesh(stage=2, data=2)  # four workers, and two meshes of two of them each
first, second = root.slice(stage=0), root.slice(stage=1)

encoder = monarch.module_to_mesh(nn.Linear(16, 64), first)
body = monarch.module_to_mesh(nn.Linear(64, 64), second)
head = monarch.module_to_mesh(nn.Linear(64, 4), first)
parameters = [*encoder.parameters(), *body.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=0.01)


@monarch.program
def step(x: Annotated[torch.Tensor, "f32[32@data, 16]"], y: Annotated[torch.Tensor, "i64[32@data]"]):
    optimizer.zero_grad()
    h = encoder(x).relu()  # on the first mesh
    deep = body(h.to(second)).relu()  # h comes to the second, from worker to worker
    loss = F.cross_entropy(head(h + deep.to(first)), y)
    loss.backward()  # gradients go the same ways back
    optimizer.step()
    return loss


x = torch.randn(32, 16)
y = x[:, :4].argmax(1)
for number in range(30):
    loss = step(x, y)
    if number % 10 == 9:
        print(f"step {number + 1}: loss {loss.item():.3f} on {loss.mesh}")
for transfer in step.compile(x, y).transfers:
    print(f"{transfer.sent} from mesh {transfer.source} to mesh {transfer.target}, {transfer.line}")
