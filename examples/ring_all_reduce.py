"""An all-reduce by hand: blocks go around a ring of workers, summed on the way and then handed on."""

from typing import Annotated

import monarch
import torch
from monarch.distributed import Mesh

Rows = Annotated[torch.Tensor, "f32[32@data, 6]"]
mesh = Mesh(data=4)


def ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of all workers' `x`, each of [n, …]: on every worker, of its own."""
    workers, me = mesh.size("data"), mesh.rank("data")
    turns = torch.arange(workers)
    blocks = x.unflatten(0, (workers, -1)).index_select(
        0, (me - turns) % workers
    )  # my own number first, then downwards
    block = blocks[0]
    for turn in range(1, workers):  # reduce-scatter: the block comes by, and takes my summand along
        block = monarch.permute(block, "data", 1) + blocks[turn]
    gathered = [block]
    for _ in range(1, workers):  # all-gather: whole blocks go around once more
        gathered.append(monarch.permute(gathered[-1], "data", 1))
    return torch.stack(gathered).index_select(0, (me + 1 - turns) % workers).flatten(0, 1)


summed = monarch.local(ring_all_reduce, in_layouts="[@data, -]", out_layouts="[@data, -]", mesh=mesh)


@monarch.program
def step(x: Rows, weight: Rows):
    x = x.detach().requires_grad_()
    y = summed(x.exp())
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    return y, gradient


x, weight = torch.randn(32, 6), torch.randn(32, 6)
y, gradient = step(x, weight)

dense = x.clone().requires_grad_()
expected = dense.exp().unflatten(0, (4, 8)).sum(0).repeat(4, 1)
(expected * weight).sum().backward()
torch.testing.assert_close(y.full_tensor(), expected.detach())
torch.testing.assert_close(gradient.full_tensor(), dense.grad)
print("as the dense sum, gradient included")
