"""Programs of several meshes on worker processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import DeviceMeshError
from monarch.distributed import Mesh

pytestmark = pytest.mark.sample(1, of="kernels")


class Halves:
    """A model whose halves are on two parts of a mesh, with one optimizer; and the same without a mesh."""

    def __init__(self, root: Mesh) -> None:
        torch.manual_seed(0)
        self.a, self.b = root.slice(stage=0), root.slice(stage=1)
        self.dense = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        first, second = nn.Linear(8, 16), nn.Linear(16, 4)
        for ours, theirs in zip((first, second), self.dense, strict=True):
            ours.load_state_dict(theirs.state_dict())
        self.first = monarch.module_to_mesh(first, self.a, {"weight": "[@data, -]"})
        self.second = monarch.module_to_mesh(second, self.b)
        parameters = [*first.parameters(), *second.parameters()]
        self.optimizer = optimizer = torch.optim.AdamW(parameters, lr=0.1)
        self.theirs = torch.optim.AdamW(self.dense.parameters(), lr=0.1)
        b = self.b

        @monarch.program
        def step(x: "f32[8@data, 8]", y: "f32[8@data, 4]") -> Any:  # type: ignore[syntax]
            optimizer.zero_grad()
            h = torch.relu(first(x))
            if not x.isfinite().all():
                raise ValueError("not finite")
            loss = F.mse_loss(second(h.to(b)), y)
            loss.backward()
            optimizer.step()
            return loss, h

        self.step = step

    def check(self, steps: int) -> None:
        for _ in range(steps):
            x, y = torch.randn(8, 8), torch.randn(8, 4)
            loss, h = self.step(x, y)
            self.theirs.zero_grad()
            hidden = torch.relu(self.dense[0](x))
            wanted = F.mse_loss(self.dense[1](hidden), y)
            wanted.backward()
            self.theirs.step()
            torch.testing.assert_close(loss.full_tensor(), wanted.detach())
            torch.testing.assert_close(h.full_tensor(), hidden.detach())
        self.same()

    def same(self) -> None:
        for ours, theirs in zip((self.first, self.second), self.dense, strict=True):
            for name, value in ours.state_dict().items():
                torch.testing.assert_close(value.full_tensor(), theirs.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_halves_of_a_model_train_on_two_parts() -> None:
    with Mesh(stage=2, data=2) as root:
        halves = Halves(root)
        halves.check(4)
        with pytest.raises(DeviceMeshError):
            halves.step(torch.full((8, 8), float("nan")), torch.zeros(8, 4))[0].item()
        halves.same()
        halves.check(2)


def test_a_death_between_steps_over_two_parts_is_healed() -> None:
    with Mesh(stage=2, data=2) as root:
        root.snapshots(2)
        halves = Halves(root)
        halves.check(3)
        os.kill(root.executor.worker_pids()[1], signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
            while True:
                root.execute(lambda x: x + 1, torch.zeros(2)).full_tensor()
        assert monarch.heal_mesh(halves.a) is halves.a
        halves.check(2)
