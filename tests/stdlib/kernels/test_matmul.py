"""Matrix products with epilogues against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant
from monarch.stdlib.kernels.matmul import ACTIVATIONS, VARIANTS, matmul, matmul_slope
from tests.kernels.triton.assembly import assert_tensor_cores, assert_wide, spilled_bytes
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

SMALL = Variant({"M": 32, "N": 16, "K": 32, "GROUP": 2}, 4, 2)


def _activated(x: Tensor, activation: str) -> Tensor:
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return {
        "none": lambda: x,
        "relu": lambda: functional.relu(x),
        "silu": lambda: functional.silu(x),
        "gelu": lambda: functional.gelu(x),
        "gelu_tanh": lambda: functional.gelu(x, approximate=approximate),
    }[activation]()


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(128, 64, 64), (100, 70, 50), (1, 33, 200), (5, 3, 1)])
def test_shapes(rows: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    bias, residual = torch.randn(columns).to(dtype), torch.randn(rows, columns).to(dtype)
    with launching():
        plain, kept = matmul(a, b, variant=SMALL)
        full, before = matmul(a, b, bias=bias, activation="silu", residual=residual, keep=True, variant=SMALL)
    product = a.double() @ b.double()
    assert kept is None and before is not None
    assert_near(plain, product)
    assert_near(before, product + bias.double())
    assert_near(full, functional.silu(product + bias.double()) + residual.double())


@pytest.mark.sample(3)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_slopes(activation: str) -> None:
    a, b = torch.randn(32, 16), torch.randn(16, 16)
    with launching():
        out, before = matmul(a, b, activation=activation, keep=True, variant=SMALL)
        assert before is not None
        dbefore = matmul_slope(a, b, before, activation=activation, variant=SMALL)
    exact = before.double().requires_grad_()
    activated = _activated(exact, activation)
    assert_near(out, activated.detach(), scale=2)
    activated.backward(a.double() @ b.double())
    assert exact.grad is not None
    assert_near(dbefore, exact.grad, scale=4)


@pytest.mark.parametrize("transposed", ["a", "b", "both"])
def test_transposed_operands(transposed: str) -> None:
    a, b = torch.randn(40, 50), torch.randn(50, 30)
    a = a.T.contiguous().T if transposed != "b" else a
    b = b.T.contiguous().T if transposed != "a" else b
    with launching():
        out, _ = matmul(a, b, residual=torch.zeros(40, 60)[:, 30:], variant=SMALL)
    assert_near(out, a.double() @ b.double())


def test_every_variant_gives_the_same() -> None:
    a, b = torch.randn(150, 100), torch.randn(100, 270)
    with launching():
        for variant in VARIANTS:
            assert_near(matmul(a, b, variant=variant)[0], a.double() @ b.double())


def test_errors() -> None:
    with pytest.raises(MonarchError, match=r"a is \[4, 5\] and b \[6, 7\], and 5 is not 6"):
        matmul(meta(4, 5), meta(6, 7))
    with pytest.raises(MonarchError, match=r"bias is \[4\]; a @ b takes \[7\]"):
        matmul(meta(4, 5), meta(5, 7), bias=meta(4))
    with pytest.raises(MonarchError, match="no kernel has the activation 'swish'"):
        matmul(meta(4, 5), meta(5, 7), activation="swish")


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled(target: str) -> None:
    a, weight, out = meta(4096, 1024), meta(4096, 1024), meta(4096, 4096)
    (kernel,) = compiled(target, matmul, a, weight.T, bias=meta(4096), activation="gelu", residual=out, keep=True)
    assert_tensor_cores(kernel)
    assert_wide(kernel, kinds=("load",))


def test_variants_compile() -> None:
    a, b, out = meta(4096, 1024), meta(1024, 4096), meta(4096, 4096)
    for variant in VARIANTS:
        (kernel,) = compiled("cuda:90", matmul_slope, a, b, out, activation="gelu_tanh", variant=variant, spills=True)
        assert_tensor_cores(kernel)
        assert_wide(kernel)
        assert kernel.shared_bytes <= 227 * 1024
        assert spilled_bytes(kernel) <= 64
