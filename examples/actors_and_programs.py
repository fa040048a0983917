"""Training with actors in the workers' own processes: loaders that make the shards of each batch where they are needed,
and a judge in each process that looks at the model's weights. No tensor passes through this process.
"""

import monarch
import torch
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.distributed import Mesh
from torch import nn

STEPS, BATCH = 60, 32


def points(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in a square, and whether they lie within a circle."""
    where = torch.rand(count, 2, generator=random) * 2 - 1
    return where, (where.square().sum(1, keepdim=True) < 0.5).float()


class Loader(Actor):
    """Makes data: in each process other data."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(current_rank().rank)

    @endpoint
    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        return points(BATCH, self.random)


class Judge(Actor):
    """Tries weights on data that they were not trained with."""

    def __init__(self) -> None:
        self.x, self.y = points(1000, torch.Generator().manual_seed(-1 - current_rank().rank))

    @endpoint
    def accuracy(self, model: nn.Module) -> float:
        """The model's parameters are the worker's own, not copies; here it is a module like any other."""
        with torch.no_grad():
            return float(((model(self.x) > 0) == (self.y > 0.5)).float().mean())


procs = this_host().spawn_procs(per_host={"data": 2})
loaders, judges = procs.spawn("loaders", Loader), procs.spawn("judges", Judge)
mesh = Mesh(procs=procs)  # a worker in each of the same processes

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
model = monarch.module_to_mesh(layers, mesh, {"*": None})
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)


@monarch.program
def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


coming = loaders.next.shards()
for step in range(STEPS):
    x, y = mesh.from_shards(coming, "[@data, -]")  # f32[64@data, 2] and f32[64@data, 1]
    coming = loaders.next.shards()  # made while the workers train
    loss = train(x, y)
    if step % 20 == 19:
        right = judges.accuracy.call(model).get().values()
        print(f"step {step + 1}: loss {loss.item():.3f}, right {' and '.join(f'{part:.0%}' for part in right)}")
