"""Look at a program before anything runs: its graph, partitioned graph and plan, for a mesh with no workers."""

import sys
from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import MLP
from monarch.stdlib.parallel import tensor_parallel
from torch import nn

Inputs = Annotated[torch.Tensor, "f32[16@data, 32]"]
Labels = Annotated[torch.Tensor, "i64[16@data]"]

mesh = Mesh.abstract(data=2, model=2)
model = nn.Sequential(MLP(32), nn.Linear(32, 8))
model = monarch.module_to_mesh(model, mesh, layouts=tensor_parallel(model, mesh, "model"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@monarch.program
def train_step(x: Inputs, labels: Labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss


if __name__ == "__main__":
    x, labels = torch.randn(16, 32), torch.randint(8, (16,))
    print(train_step.trace(x, labels).graph)  # global types
    print(train_step.trace(x, labels).partition().graph)  # local types, collectives explicit

    path = sys.argv[1] if len(sys.argv) > 1 else "step.mplan"
    train_step.compile(x, labels).save(path)
    print(f"the plan lies in {path}: see it with monarchc inspect {path}")
