"""What programs refuse of PyTorch's ops: each error has a way out, and the way out computes what PyTorch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from monarch.compiler.errors import MonarchError
from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh, layout, program
from tests.compiler.reference import run_reference

MESH = Mesh.abstract(data=2)
X, Y = torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([3.0, 1.0, 2.0, 4.0])
N = torch.tensor([1, 0, 2, 1])
MATRIX = torch.tensor([[2.0, 1.0], [1.0, 3.0], [0.5, 1.0], [1.0, 1.0]])


def _put(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[x > 1] *= 2
    return y


def _copied(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.copy_(torch.where(x > 1, y * 2, y))
    return y


def _put_rows(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[x.sum(1) > 2] = y[x.sum(1) > 2].exp() - x[x.sum(1) > 2]
    return y


def _copied_rows(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.copy_(torch.where((x.sum(1) > 2)[..., None], y.exp() - x, y))
    return y


def _distinct(x: torch.Tensor) -> torch.Tensor:
    y = x.sort()[0]
    return (y * torch.cat([torch.ones(1, dtype=torch.bool), y.diff() != 0])).sum()


def _covariance(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    centred = x - (x * w).sum(1, True) / w.sum()
    return (centred * w) @ centred.T / (w.sum() - 1)


def _solved(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    q, r = torch.linalg.qr(a)
    return torch.linalg.solve_triangular(r, q.mT @ b, upper=True)


Case = tuple[Callable[..., Any], str, Callable[..., Any], Sequence[torch.Tensor]]
"""What is refused, what the error says to write, that, and inputs."""

CASES: dict[str, Case] = {
    "item": (
        lambda x: x[0].item() + x,
        "lambda x: x[0].detach() + x",
        lambda x: x[0].detach() + x,
        [X],
    ),
    "allclose": (
        lambda x, y: x * torch.allclose(x, y),
        "torch.isclose(a, b).all()",
        lambda x, y: x * torch.isclose(x, y).all(),
        [X, Y],
    ),
    "equal": (
        lambda x, y: x * torch.equal(x, y),
        "(a == b).all()",
        lambda x, y: x * (x == y).all(),
        [X, Y],
    ),
    "masked_select": (
        lambda x, y: torch.masked_select(x, x < y).sum(),
        "x * mask",
        lambda x, y: (x * (x < y)).sum(),
        [X, Y],
    ),
    "a mask's entries, changed": (_put, "y.copy_(torch.where(x > 1, y * 2, y))", _copied, [X]),
    "a mask's rows, changed": (
        _put_rows,
        "y.copy_(torch.where((x.sum(1) > 2)[..., None], y.exp() - x, y))",
        _copied_rows,
        [MATRIX],
    ),
    "resized": (
        lambda x: (x.T * 2).resize_(3, 2),
        "x = x.flatten()[: math.prod(size)].view(size)",
        lambda x: (x * 2).flatten()[:6].view(3, 2),
        [MATRIX],
    ),
    "an index by a mask": (
        lambda x: x[x > 1].sum(),
        "(x * mask).sum()",
        lambda x: (x * (x > 1)).sum(),
        [X],
    ),
    "nonzero": (
        lambda x: x.nonzero().shape[0] + x,
        "torch.count_nonzero",
        lambda x: torch.count_nonzero(x) + x,
        [X],
    ),
    "unique": (
        lambda x: torch.unique(x).sum(),
        "torch.cat([torch.ones(1, dtype=torch.bool), y.diff() != 0])",
        _distinct,
        [X],
    ),
    "bincount": (
        lambda n: torch.bincount(n),
        "torch.zeros(n, dtype=x.dtype).index_add(0, x, torch.ones_like(x))",
        lambda n: torch.zeros(3, dtype=n.dtype).index_add(0, n, torch.ones_like(n)),
        [N],
    ),
    "one_hot": (
        lambda n: F.one_hot(n),
        "F.one_hot(x, num_classes=10)",
        lambda n: F.one_hot(n, num_classes=3),
        [N],
    ),
    "repeat_interleave": (
        lambda x, n: torch.repeat_interleave(x, n),
        "output_size",
        lambda x, n: torch.repeat_interleave(x, n, output_size=4),
        [X, N],
    ),
    "cov": (
        lambda x, n: torch.cov(x, fweights=n),
        "(centred * w) @ centred.T / (w.sum() - 1)",
        _covariance,
        [MATRIX.T.contiguous(), N],
    ),
    "lstsq": (
        lambda a, b: torch.linalg.lstsq(a, b)[0],
        "torch.linalg.solve_triangular(r, q.mT @ b, upper=True)",
        _solved,
        [MATRIX, MATRIX[:, :1]],
    ),
    "tensor_split": (
        lambda x: torch.tensor_split(x, x[:1].long())[0].sum() + x,
        "x * (torch.arange(x.shape[0]) < at)",
        lambda x: (x * (torch.arange(4) < x[:1].long())).sum() + x,
        [X],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_way_out_of_a_refusal_computes_the_same(case: str) -> None:
    refused, said, way_out, inputs = CASES[case]
    with pytest.raises(MonarchError) as error:
        _traced(refused, inputs)
    assert said in f"{error.value.message}\n{error.value.hint}"
    (found,) = run_reference(partition_graph(_traced(way_out, inputs)), dict(enumerate(inputs)))[0]
    torch.testing.assert_close(found, refused(*inputs))


def _traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
    def step(*inputs: torch.Tensor) -> Any:
        return function(*(layout(x, ["data", *[None] * (x.ndim - 1)]) for x in inputs))

    return program(step, mesh=MESH).trace(*inputs).graph
