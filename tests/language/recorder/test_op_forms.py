"""Forms of ATen calls that the graph has no op for: in place, in place for shapes, strided, sparse, data-dependent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh, distribute, program
from monarch.language.errors import OperatorError
from tests.compiler.reference import run_reference

MESH = Mesh.abstract(data=2)


def made_by(function: Callable[..., Any], x: torch.Tensor) -> Any:
    placed = distribute(x, MESH, ["data", *[None] * (x.ndim - 1)])
    graph = partition_graph(program(mesh=MESH)(function).trace(placed).graph)
    return run_reference(graph, {0: x, **{node.meta["label"]: 1 for node in graph.placeholders[1:]}})[0]


def in_place_power(x: torch.Tensor) -> Any:
    y = x.abs() + 1
    y.pow_(3)
    y.pow_(x.abs())
    y.floor_divide_(x.abs() + 1)
    return (y,)


def squeezed_in_place(x: torch.Tensor) -> Any:
    x = x * 1
    y = x.unsqueeze_(1).squeeze_(1)
    y.mul_(2)
    z = y.unsqueeze_(0)
    z[0, 1].add_(3)
    return x, y, z.transpose_(1, 2), torch.quantile(x, 0.3), torch.ones(4) @ x[0]


def squeezed_in_place_under_autograd(x: torch.Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    y = (x * 2).unsqueeze(1)
    y.squeeze_(1)
    return torch.autograd.grad((y * y).sum(), [x])


def strided(x: torch.Tensor) -> Any:
    x = x.t().contiguous()
    part = x[1:].as_strided((2, 3), (1, 4), 2)
    windows = x.flatten()[::2].contiguous().as_strided((3, 3), (2, 1))
    seen = part * 2
    part.add_(10)
    turned = torch.as_strided_copy(x.t(), (2, 3), (2, 1), 1), torch.pdist(x.t())
    put = x.as_strided_scatter(torch.ones(2), (2,), (5,), 1), x[1:].as_strided_scatter(torch.ones(2), (2,), (5,), 5)
    return x, seen, windows, *turned, *put


def inference_batch_norm(x: torch.Tensor) -> Any:
    mean, var = x.mean(0).detach(), x.var(0).detach()
    made = torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, False, 0.1, 1e-5)
    return made[0], mean, var


def gradients_of_nothing(x: torch.Tensor) -> Any:
    """PyTorch's shape functions of these divide by how many elements there are."""
    x = x[:0].detach().requires_grad_()
    y = torch.zeros(0, 4)
    losses = F.mse_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y), F.cross_entropy(x[:, :0], y[:, 0].long())
    normed = F.group_norm(x.t().reshape(2, 2, 0), 1).sum()
    return *(loss.detach() for loss in losses), torch.autograd.grad(sum(losses, normed), x)[0]


def diagonals_of_any_strides(x: torch.Tensor) -> Any:
    turned, tall = x.t().clone(), torch.cat([x, x, x]).t().clone().t()
    turned.fill_diagonal_(4.0)
    y = (x * 2).t().fill_diagonal_(5)
    return turned, tall.fill_diagonal_(3.0, wrap=True), y, torch.stack([x, x, x, x]).fill_diagonal_(1.0)


def numbers_within_transforms(x: torch.Tensor) -> Any:
    shifted = torch.vmap(torch.vmap(lambda a, b: a * b + 1))(x, x)
    return shifted, torch.vmap(lambda a: 3 - a / 2 + True)(x)


def repeated_by_known_numbers(x: torch.Tensor) -> Any:
    repeats = torch.tensor([1, 0, 2, 3])
    return x.repeat_interleave(repeats, 0), x.repeat_interleave(repeats.sum() - repeats, 1)


def products_and_spreads(x: torch.Tensor) -> Any:
    """PyTorch's compute with sizes as numbers, and `kron` writes to a view that it calls none."""
    x = x.detach().requires_grad_()
    made = torch.zeros(4, 16)
    torch.kron(x.detach(), x[0].detach(), out=made)
    spreads = torch.cov(x), torch.cov(x[0], correction=0), torch.corrcoef(x), torch.linalg.vander(x, N=3)
    products = torch.kron(x, x[:2]), torch.kron(x[0], x[1]), torch.kron(x.sum(), x)
    chains = (
        torch.linalg.multi_dot([x, x.T, x]),
        torch.linalg.multi_dot([x[0], x.T, x[:, :1], x[:1], x[1]]),
    )
    products = *products, *chains
    (gradient,) = torch.autograd.grad(sum((each**2).sum() for each in (*spreads, *products)), x)
    whole = torch.vander(torch.tensor([True, False])), torch.cov(torch.arange(4).view(2, 2))
    return made, *(each.detach() for each in (*spreads, *products)), gradient, *whole


def comparisons_in_place(x: torch.Tensor) -> Any:
    """Their results are those of PyTorch's operands, not bools."""
    made = [x.double(), x.double(), x.clone(), x.clone(), x.clone()]
    (
        made[0].ge_(0.3),
        made[1].logical_not_(),
        made[2].ne_(x.flip(0)),
        made[3].logical_xor_(x > 0),
        made[4][1:].lt_(x[:1]),
    )
    equal = torch.zeros_like(x)
    torch.eq(x, x.abs(), out=equal)
    return *(each * 2.5 for each in (*made, equal)), torch.signbit(x, out=torch.ones(x.shape, dtype=torch.bool))


def factories_that_write(x: torch.Tensor) -> Any:
    def out(*shape: int) -> torch.Tensor:
        return torch.full(shape, 7.0, dtype=torch.float64)

    made = [torch.eye(3, out=out(3, 3)), torch.linspace(0, 1, 5, out=out(5)), torch.logspace(0, 1, 5, out=out(5))]
    made += [torch.zeros(3, out=out(3)), torch.ones(3, out=out(3)), torch.full((3,), 2.0, out=out(3))]
    made += [torch.arange(3, out=out(3)), torch.arange(1, 7, 2, out=out(3))]
    return *made, torch.max(x, out=torch.zeros(())), torch.min(x, out=torch.zeros(()))


@pytest.mark.parametrize(
    "function",
    [
        comparisons_in_place,
        factories_that_write,
        products_and_spreads,
        diagonals_of_any_strides,
        numbers_within_transforms,
        repeated_by_known_numbers,
        gradients_of_nothing,
        in_place_power,
        squeezed_in_place,
        squeezed_in_place_under_autograd,
        strided,
        inference_batch_norm,
    ],
    ids=lambda function: function.__name__,
)
def test_it_is_what_pytorch_computes(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 4)
    results = {id(result): result for result in function(x)}  # a graph gives each once
    for one, other in zip(made_by(function, x), results.values(), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_rrelu_draws_slopes_and_keeps_them_for_the_gradient() -> None:
    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = F.rrelu(x, 0.1, 0.3, training=True)
        return y, *torch.autograd.grad(y.sum(), [x])

    x = -torch.rand(8, 8) - 0.5
    y, slopes = made_by(step, x)
    torch.testing.assert_close(y, x * slopes)
    assert ((slopes >= 0.1) & (slopes <= 0.3)).all() and slopes.unique().numel() > 8


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x.nonzero(), r"aten.nonzero gives a tensor whose shape depends on values[\s\S]*torch.where"),
        (lambda x: x.unique(), "gives a tensor whose shape depends on values"),
        (lambda x: torch.bincount(x[0].long()), r"aten.bincount gives[\s\S]*index_add"),
        (lambda x: torch.linalg.lstsq(x, x).solution, r"aten.linalg_lstsq gives[\s\S]*torch.linalg.qr"),
        (lambda x: x.to_sparse(), "aten._to_sparse gives a sparse tensor"),
        (lambda x: torch.empty_strided((4, 2), (1, 8)).as_strided((2,), (1,)), r"as_strided of .* strides \(1, 8\)"),
        (
            lambda x: x.t().as_strided_scatter(torch.ones(2), (2,), (1,)),
            "as_strided_scatter of a part of a tensor's memory",
        ),
        (lambda x: (x.t() * 2).resize_(2, 3), "resize_ changes a tensor's shape in place"),
        (lambda x: (x * 2)[1:].resize_(2, 3), "resize_ changes a tensor's shape in place"),
        (lambda x: x.squeeze_(), "squeeze_ changes a tensor's shape in place"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        made_by(function, torch.randn(4, 4))
