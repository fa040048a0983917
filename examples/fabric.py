"""A loop written with Lightning Fabric, unchanged, on a mesh: its strategy is the only line that knows of one."""

from __future__ import annotations

import logging

import lightning
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh
from monarch.lightning import FabricMeshStrategy
from monarch.stdlib.parallel import fully_shard
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    mesh = Mesh(data=2)
    strategy = FabricMeshStrategy(mesh, layouts=lambda model: fully_shard(model, mesh, "data"))

    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(512, 16)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1) > 0), batch_size=64, shuffle=True))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    losses = []
    for epoch in range(4):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), labels.long())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch}: loss {losses[-1].item():.3f}")

    weight = next(model.parameters())
    print(f"{type(weight).__name__} {list(weight.shape)}, sharded {weight.sharding}")


if __name__ == "__main__":
    main()
