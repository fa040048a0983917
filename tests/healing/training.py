"""The training that tests of healing share: two linear layers with another between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import monarch
from monarch.distributed import Mesh


class Training:
    """A model with these layouts on `mesh`, its optimizer, and a step, with `options` of `monarch.program`."""

    def __init__(self, mesh: Mesh, between: nn.Module, layouts: dict[str, str | None], **options: Any) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 12), between, nn.Linear(12, 6))
        self.model = monarch.module_to_mesh(plain, mesh, layouts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

        @monarch.program(mesh=mesh, **options)
        def step(x: "f32[12@data, 6]") -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

        self.step: Any = step
