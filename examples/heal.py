"""Training goes on where a worker is killed: every ten steps one is. With new workers in their places the parameters at
the end are, bit for bit, those of a run in which none was; on a mesh that shrinks, and grows again, they are close.

    python examples/heal.py [STEPS] [--policy respawn|shrink|own]
"""

import argparse
import os
import random
import signal
from typing import Annotated

import monarch
import torch
from monarch.distributed import Mesh
from torch import nn
from torch.nn import functional as F

Inputs = Annotated[torch.Tensor, "f32[16@data, 8]"]
Labels = Annotated[torch.Tensor, "i64[16@data]"]
parser = argparse.ArgumentParser()
parser.add_argument("steps", nargs="?", type=int, default=50)
parser.add_argument("--policy", choices=["respawn", "shrink", "own"], default="respawn")
options = parser.parse_args()


def own(failure: monarch.MeshFailure):
    """A policy of one's own: shrink once, and after that take new workers."""
    print(f"lost: {', '.join(map(str, failure.coordinates))}")
    return "shrink" if len(failure.mesh) == 4 else "respawn"


policy = own if options.policy == "own" else options.policy


def train(deaths: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    loader = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(options.steps)]
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

        losses = []
        for i, batch in enumerate(loader):
            if i % 10 == 0:
                monarch.resize_mesh(mesh, data=4)  # back to the full size, if it has shrunk
            if deaths and i % 10 == 5:
                os.kill(random.choice(mesh.executor.worker_pids()), signal.SIGKILL)
            try:
                losses.append(train_step(*batch).item())
            except monarch.exceptions.DeviceMeshError as error:
                print(f"step {i}: {error.message}")
                mesh = monarch.heal_mesh(mesh, policy)
                print(f"goes on with {len(mesh)} workers")
                losses.append(train_step(*batch).item())  # the failed step again: nothing was half applied
        print(f"loss {losses[-1]:.6f}")
        return {name: value.full_tensor() for name, value in model.state_dict().items()}


without, healed = train(deaths=False), train(deaths=True)
if policy == "respawn":
    print("the same bits:", all(torch.equal(without[name], healed[name]) for name in without))
else:
    print("close:", all(torch.allclose(without[name], healed[name], rtol=1e-3, atol=1e-4) for name in without))
