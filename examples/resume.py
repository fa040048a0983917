"""Training goes on from a checkpoint on another mesh, with other layouts, as if it had never stopped.

python examples/resume.py
"""

import tempfile

import monarch
import torch
from monarch.distributed import Mesh
from torch import nn
from torch.nn import functional as F


def training(mesh, layouts):
    """What training consists of, and a step of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    monarch.module_to_mesh(model, mesh, layouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor, y: torch.Tensor):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {**parts, "random": torch.default_generator, "step": 0}, step


def train(state, step, until):
    losses = []
    for number in range(state["step"], until):
        data = torch.Generator().manual_seed(number)
        losses.append(step(torch.randn(8, 10, generator=data), torch.randint(3, (8,), generator=data)))
        state["scheduler"].step()
    state["step"] = until
    return losses[-1].item()


folder = tempfile.mkdtemp()
with Mesh(data=2, model=2) as mesh:
    state, step = training(mesh, {"0.weight": "[@model, @data]", "3.weight": "[@data, @model]"})
    train(state, step, 10)
    monarch.save(state, f"{folder}/10")  # while the next steps run
    print(f"2 x 2 workers, all 20 steps: {train(state, step, 20):.5f}")

with Mesh(data=3) as mesh:
    state, step = training(mesh, {"*.weight": "[@data, -]"})
    monarch.load(f"{folder}/10", into=state)
    print(f"3 workers, from step {state['step']}:   {train(state, step, 20):.5f}")
