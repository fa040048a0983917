"""A parameter server: workers read the weights, and write their gradients, straight into its memory.

The server hands out `RDMABuffer`s once. From then on weights and gradients go from memory to memory, over the fastest
transport that joins two processes, and a message says no more than "there is a gradient". Workers do not wait for one
another.
"""

import torch
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.rdma import RDMABuffer
from torch import nn

STEPS, RATE = 150, 0.5


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))


def flat_parameters(module: nn.Module) -> torch.Tensor:
    """Lay a module's parameters into one tensor, of which they are views from then on."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    at = 0
    for parameter in module.parameters():
        parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return flat


def moons(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two half circles, one in the other, as points with their class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    angle = torch.rand(count, generator=generator) * torch.pi
    side = 1.0 - 2.0 * labels
    points = torch.stack([angle.cos() * side + labels, angle.sin() * side + 0.5 * labels], dim=1)
    return points + 0.1 * torch.randn(count, 2, generator=generator), labels


class Server(Actor):
    """Has the weights, and for each worker a place for its gradient."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.weights = flat_parameters(self.model)
        self.gradients = [torch.zeros_like(self.weights) for _ in range(workers)]
        self.updates = 0

    @endpoint
    def join(self, worker: int) -> tuple[RDMABuffer, RDMABuffer]:
        """Where a worker finds the weights, and where it puts its gradient."""
        return RDMABuffer(self.weights), RDMABuffer(self.gradients[worker])

    @endpoint
    def apply(self, worker: int) -> None:
        """This worker's gradient is there."""
        self.weights -= RATE * self.gradients[worker]
        self.updates += 1

    @endpoint
    def evaluate(self) -> tuple[int, float]:
        """How many updates there were, and the share of new points that are put into the right class."""
        points, labels = moons(1000, seed=99)
        with torch.no_grad():
            return self.updates, (self.model(points).argmax(1) == labels).float().mean().item()


class Worker(Actor):
    def __init__(self, server: Server) -> None:
        self.rank = current_rank().rank
        self.server = server
        self.weights_there, self.gradient_there = server.join.call_one(self.rank).get()
        self.model = model()
        self.weights = flat_parameters(self.model)
        self.points, self.labels = moons(500, seed=self.rank)  # each has data of its own

    @endpoint
    def train(self, steps: int) -> str:
        for _ in range(steps):
            self.weights_there.read_into(self.weights).get()
            loss = nn.functional.cross_entropy(self.model(self.points), self.labels)
            gradients = torch.autograd.grad(loss, list(self.model.parameters()))
            self.gradient_there.write_from(torch.cat([gradient.reshape(-1) for gradient in gradients])).get()
            self.server.apply.call_one(self.rank).get()
        return self.weights_there.backend


def main() -> None:
    procs = this_host().spawn_procs(per_host={"procs": 3})
    server = procs.slice(procs=0).spawn("server", Server, 2)
    workers = procs.slice(procs=slice(1, 3)).spawn("workers", Worker, server)

    _, before = server.evaluate.call_one().get()
    transports = set(workers.train.call(STEPS).get().values())
    updates, after = server.evaluate.call_one().get()
    print(f"weights and gradients went by {' and '.join(sorted(transports))}")
    print(f"right before: {before:.0%}, after {updates} updates of 2 workers: {after:.0%}")


if __name__ == "__main__":
    main()
