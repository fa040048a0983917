"""Products of tokens with their experts' weights against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.grouped_matmul import (
    GRADIENT_VARIANTS,
    VARIANTS,
    grouped_matmul,
    grouped_matmul_gradient,
)
from monarch.stdlib.kernels.launch import Variant
from tests.kernels.triton.assembly import assert_tensor_cores, assert_wide
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

SMALL = Variant({"M": 16, "N": 32, "K": 16, "GROUP": 2}, 4, 2)
COUNTS = {"uneven": [5, 0, 40, 33, 16], "one has all": [0, 0, 50], "one expert": [20], "none": [0, 0]}


def _starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_experts(counts: list[int], dtype: torch.dtype) -> None:
    x, dout = (torch.randn(sum(counts), size).to(dtype) for size in (48, 70))
    weights, bias = torch.randn(len(counts), 48, 70).to(dtype), torch.randn(len(counts), 70).to(dtype)
    starts = _starts(counts)
    with launching():
        out = grouped_matmul(x, weights, starts, bias=bias, activation="silu", variant=SMALL)
        dx = grouped_matmul(dout, weights.mT, starts, variant=SMALL)
        dweights = grouped_matmul_gradient(x, dout, starts, variant=Variant({"M": 16, "N": 32, "K": 16}, 4, 2))
    w = weights.double()
    products = [a.double() @ w[e] + bias[e].double() for e, a in enumerate(x.split(counts))]
    assert_near(out, functional.silu(torch.cat(products)))
    assert_near(dx, torch.cat([d.double() @ w[e].T for e, d in enumerate(dout.split(counts))]))
    pairs = zip(x.split(counts), dout.split(counts), strict=True)
    assert_near(dweights, torch.stack([a.double().T @ d.double() for a, d in pairs]))


def test_every_variant_gives_the_same() -> None:
    counts = [70, 3, 140]
    x, weights, starts = torch.randn(213, 90), torch.randn(3, 90, 130), _starts(counts)
    exact = torch.cat([a.double() @ weights[e].double() for e, a in enumerate(x.split(counts))])
    with launching():
        for variant in VARIANTS:
            assert_near(grouped_matmul(x, weights, starts, variant=variant), exact)
        for variant in GRADIENT_VARIANTS:
            dweights = grouped_matmul_gradient(x, x, starts, variant=variant)
            assert_near(dweights, torch.stack([a.double().T @ a.double() for a in x.split(counts)]))


def test_errors() -> None:
    with pytest.raises(MonarchError, match=r"x is \[8, 16\], weights \[2, 32, 8\] and starts \[3\]"):
        grouped_matmul(meta(8, 16), meta(2, 32, 8), meta(3))
    with pytest.raises(MonarchError, match=r"is \[2, 8\] and bias \[8\]"):
        grouped_matmul(meta(8, 16), meta(2, 16, 8), meta(3), bias=meta(8))
    with pytest.raises(MonarchError, match=r"x is \[8, 16\] and dout \[9, 16\]"):
        grouped_matmul_gradient(meta(8, 16), meta(9, 16), meta(3))


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled(target: str) -> None:
    x, weights, starts = meta(8192, 1024), meta(64, 1024, 2048), meta(65, dtype=torch.int32)
    for variant in VARIANTS[: None if target == "cuda:90" else 1]:
        for kernel in compiled(target, grouped_matmul, x, weights, starts, activation="silu", variant=variant):
            assert_tensor_cores(kernel)
            assert_wide(kernel, kinds=("load",))
    for variant in GRADIENT_VARIANTS[: None if target == "cuda:90" else 1]:
        for kernel in compiled(target, grouped_matmul_gradient, x, meta(8192, 2048), starts, variant=variant):
            assert_tensor_cores(kernel)
            assert_wide(kernel, kinds=("load",))
