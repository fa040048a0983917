"""Determinants have PyTorch's gradients however a worker holds the matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import linalg

import monarch
from monarch.language.errors import OperatorError
from tests.language.partitioned import partitioned_mesh

ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.mT,
    "transposed, contiguous": lambda x: x.mT.contiguous(),
    "of a kernel": lambda x: linalg.svd(x)[2] + 1,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["[-, -]", "[@data, -]", "[-, @data]"])
def test_a_determinant_has_its_gradient_in_each_order_of_memory(order: str, layout: str) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y = ORDERS[order](x)
        sign, logarithm = linalg.slogdet(y)
        (one,) = torch.autograd.grad(linalg.det(y), x, create_graph=True)
        (two,) = torch.autograd.grad((one * torch.arange(9.0).view(3, 3)).sum(), x, retain_graph=True)
        return sign, logarithm, one, two, *torch.autograd.grad(logarithm, x)

    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with partitioned_mesh(data=2) as mesh:
        for got, want in zip(monarch.program(run)(monarch.distribute(x, mesh, layout)), run(x), strict=True):
            torch.testing.assert_close(got.full_tensor(), want)


def test_a_determinant_of_what_has_none_is_pytorch_s_error() -> None:
    with partitioned_mesh(data=2) as mesh:
        for shape in ((3,), (2, 3)):
            with pytest.raises(OperatorError, match="A must be batches of square matrices|at least 2 dim"):
                monarch.program(mesh=mesh)(lambda x: linalg.det(x))(torch.ones(shape))
        assert monarch.program(mesh=mesh)(lambda x: linalg.det(x))(torch.ones(2, 0, 0)).tolist() == [1, 1]
