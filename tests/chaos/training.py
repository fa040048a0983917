"""A small training whose every bit can be compared: of the demo's model, sharded over `model` and replicated along
`data`, so that any worker that is lost has one that holds the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import monarch
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import tensor_parallel
from monarch.testing import chaos

DIMS = {"data": 2, "model": 2}
ROWS, SEQUENCE, VOCABULARY = 8, 16, 32


class Small(nn.Module):
    """In place of the demo's model where seconds count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(tokens))


class Training:
    """`done` counts the steps that were applied, on the mesh and with them."""

    def __init__(self, mesh: Mesh, small: bool, redundant: bool = False) -> None:
        """With `redundant` the small one's weights are sharded over all workers, and others keep copies of them."""
        torch.manual_seed(0)
        self.mesh, self.workers = mesh, 4
        if small:
            plain: nn.Module = Small()
            layouts: Any = {"*": None, "layers.*.weight": "[@(data,model), -]" if redundant else "[@model, -]"}
        else:
            plain = GPT(vocabulary=VOCABULARY, width=32, heads=4, layers=2, sequence=SEQUENCE)
            layouts = tensor_parallel(plain, mesh, "model")
        self.model = monarch.module_to_mesh(plain, mesh, layouts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.done = monarch.distribute(torch.zeros((), dtype=torch.int64), mesh, "[]")
        self.large = monarch.distribute(torch.arange(1 << 16), mesh, "[@model]")  # no packet takes a worker's block

        @monarch.program(mesh=mesh, redundancy=int(redundant))
        def step(tokens: "i64[8@data, 16]", targets: "i64[8@data, 16]"):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            self.optimizer.step()
            self.done.add_(1)
            return loss

        self.step = step
        self.instructions = 0
        """Of the step's plan."""

    def prepare(self, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        """Take the steps in which the program is compiled and its calls become quick; gives at how many points one that
        is can be interrupted."""
        passed = []
        for _ in range(12):
            with chaos.interrupt(-1) as points:
                self.step(*batch).item()
            passed.append(points.passed)
        plans = [plan() for plan, _ in self.mesh.executor.plans.values()]  # type: ignore[attr-defined]
        self.instructions = max(len(plan.instructions) for plan in plans if plan is not None)
        self._before = int(self.done.full_tensor())
        return min(passed)

    def applied(self) -> int:
        """How many steps have been applied since `prepare`."""
        return int(self.done.full_tensor()) - self._before

    def touch(self) -> None:
        """Use the mesh, and change nothing."""
        monarch.distribute(torch.zeros(1), self.mesh, "[-]").full_tensor()

    def apart_from(self, worker: int) -> int:
        """A worker that may be lost with this one: another one holds the same as it."""
        return worker ^ 1

    def state(self) -> list[torch.Tensor]:
        """Parameters and the optimizer's state, in one order."""
        moments = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        values = [*self.model.parameters(), *(each[key] for each in moments for key in sorted(each)), self.done]
        return [value.detach().full_tensor() for value in values]


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCABULARY, (steps, ROWS, SEQUENCE + 1), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in text]
