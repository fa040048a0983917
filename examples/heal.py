"""Training goes on where a worker is killed: every ten steps one is, and the parameters at the end are, bit for bit,
those of a run in which none was.

    python examples/heal.py [STEPS]
"""

import os
import random
import signal
import sys
from typing import Annotated

import torch
from torch import nn
from torch.nn import functional as F

import monarch
from monarch.distributed import Mesh

Inputs = Annotated[torch.Tensor, "f32[16@data, 8]"]
Labels = Annotated[torch.Tensor, "i64[16@data]"]
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 50


def train(deaths: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    loader = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(STEPS)]
    with Mesh(data=4) as mesh:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        monarch.module_to_mesh(model, mesh, {"*": None})  # replicated: each worker can stand in for any other
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        @monarch.program
        def train_step(x: Inputs, y: Labels):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for i, batch in enumerate(loader):
            if deaths and i % 10 == 5:
                os.kill(random.choice(mesh.executor.worker_pids()), signal.SIGKILL)
            try:
                loss = train_step(*batch)
                value = loss.item()
            except monarch.exceptions.DeviceMeshError as error:
                print(f"step {i}: {error.message}")
                mesh = monarch.heal_mesh(mesh)
                loss = train_step(*batch)  # the failed step again: nothing was half applied
                value = loss.item()
        print(f"loss {value:.6f}")
        return {name: value.full_tensor() for name, value in model.state_dict().items()}


without, healed = train(deaths=False), train(deaths=True)
print("the same bits:", all(torch.equal(without[name], healed[name]) for name in without))
