"""An ordinary PyTorch training loop over a mesh: each op is recorded, and runs when a value is needed."""

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import Block
from torch import nn


class SimpleTransformer(nn.Module):
    """Classifies sequences of 16 vectors: f32[batch, 16, 32] to logits f32[batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(width=32, heads=4)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).mean(1))


torch.manual_seed(0)
mesh = Mesh(data=4)
inputs = torch.randn(32, 16, 32)
labels = inputs.mean((1, 2)).gt(0).long() + 2 * inputs[:, 0, 0].gt(0).long()
x = monarch.distribute(inputs, mesh, "[@data, -, -]")
target = monarch.distribute(labels, mesh, "[@data]")

model = monarch.module_to_mesh(SimpleTransformer(), mesh)  # parameters placed on the mesh
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(20):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    if step % 5 == 0 or step == 19:
        print(f"step {step:2}: loss {loss.item():.4f}")
