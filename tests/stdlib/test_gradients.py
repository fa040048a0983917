"""`monarch.grad_generator`: the gradients of `torch.autograd.grad`, one after the other."""

from __future__ import annotations

import torch

import monarch
from monarch.distributed import Mesh


def loss_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().sum()


def test_gradients_are_those_of_autograd_in_the_order_asked() -> None:
    x, w, unused = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(loss_of(x, w), (w, x))
    found = list(monarch.grad_generator(loss_of(x, w), (w, unused, x)))
    assert found[1] is None
    torch.testing.assert_close((found[0], found[2]), expected)


def test_roots_have_gradients_of_their_own() -> None:
    x = torch.randn(3, requires_grad=True)
    (found,) = monarch.grad_generator((x.square(), x.sum()), (x,), (torch.full((3,), 2.0),))
    torch.testing.assert_close(found, 4 * x.detach() + 1)


def test_also_on_a_mesh_of_workers() -> None:
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    expected = torch.autograd.grad(loss_of(x, w.requires_grad_()), w)[0]
    with Mesh(data=2) as mesh:
        there = monarch.distribute(w.detach(), mesh, "[-, -]").requires_grad_()
        (found,) = monarch.grad_generator(loss_of(monarch.distribute(x, mesh, "[@data, -]"), there), (there,))
        assert isinstance(found, monarch.DistributedTensor)
        torch.testing.assert_close(found.full_tensor(), expected)
