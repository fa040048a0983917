"""RMSNorm and LayerNorm with a residual: numbers against float64, and what they compile to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels import norms
from tests.kernels.triton.assembly import assert_wide, spilled_bytes
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

SHAPES = [(7, 96), (33, 257), (2, 3, 1024), (5, 16), (1, 3)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, dy, dsummed = torch.randn(4, *shape).to(dtype)
    weight = (1 + torch.randn(shape[-1])).to(dtype)
    with launching():
        y, summed, rstd = norms.rms_norm(x, weight, 1e-3, residual=residual)
        dx, dweight = norms.rms_norm_backward(dy, summed, weight, rstd, dsummed=dsummed)
    assert torch.equal(summed, x + residual)
    s, w = _exact(summed), _exact(weight)
    exact = functional.rms_norm(s, shape[-1:], w, 1e-3)
    assert_near(y, exact.detach())
    torch.autograd.backward([exact, s], [dy.double(), dsummed.double()])
    assert_near(dx, s.grad, scale=2)
    assert_near(dweight, w.grad, scale=2)


@pytest.mark.sample(5)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    x, dy = torch.randn(2, *shape).to(dtype) + 3
    weight, shift = torch.randn(2, shape[-1]).to(dtype)
    with launching():
        y, summed, mean, rstd = norms.layer_norm(x, weight, shift if bias else None)
        dx, dweight, dbias = norms.layer_norm_backward(dy, summed, weight, mean, rstd, bias=bias)
    assert summed is x
    s, w, b = _exact(x), _exact(weight), _exact(shift)
    exact = functional.layer_norm(s, shape[-1:], w, b if bias else None)
    assert_near(y, exact.detach())
    exact.backward(dy.double())
    assert_near(dx, s.grad, scale=4)
    assert_near(dweight, w.grad, scale=4)
    assert (dbias is not None) == bias
    if dbias is not None:
        assert_near(dbias, b.grad, scale=2)


def test_rows_may_be_strided() -> None:
    wide = torch.randn(6, 5, 200)
    x, residual, dy = wide[:, 1:4, 10:110], wide[:, :3, 100:], torch.randn(100, 3, 6).permute(2, 1, 0)
    weight = torch.randn(100)
    with launching():
        y, summed, rstd = norms.rms_norm(x, weight, residual=residual)
        dx, _ = norms.rms_norm_backward(dy, summed, weight, rstd)
        plain = norms.rms_norm(x.contiguous(), weight, residual=residual.contiguous())
        dplain, _ = norms.rms_norm_backward(dy.contiguous(), summed, weight, rstd)
    assert torch.equal(y, plain[0]) and torch.equal(summed, plain[1]) and torch.equal(dx, dplain)


def test_long_rows_and_many_rows_sum_their_gradients_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = torch.randn(2, 150, 70)
    weight = torch.randn(70)
    monkeypatch.setattr(norms, "PROGRAMS", 3)
    with launching():
        _, _, mean, rstd = norms.layer_norm(x, weight)
        fused = norms.layer_norm_backward(dy, x, weight, mean, rstd)
        monkeypatch.setattr(norms, "FUSED_COLUMNS", 0)
        split = norms.layer_norm_backward(dy, x, weight, mean, rstd)
    s, w = _exact(x), _exact(weight)
    functional.layer_norm(s, (70,), w).backward(dy.double())
    for dx, dweight, dbias in (fused, split):
        assert dbias is not None
        assert_near(dx, s.grad, scale=4)
        assert_near(dweight, w.grad, scale=4)
        assert_near(dbias, dy.double().sum(0), scale=4)


def test_every_variant_gives_the_same() -> None:
    x, weight = torch.randn(9, 500), torch.randn(500)
    exact = functional.rms_norm(x.double(), (500,), weight.double(), 1e-6)
    with launching():
        for variant in norms.variants(500):
            assert_near(norms.rms_norm(x, weight, variant=variant)[0], exact)


def test_no_rows() -> None:
    weight = torch.randn(64)
    with launching():
        y, summed, rstd = norms.rms_norm(torch.empty(0, 64), weight)
        dx, dweight = norms.rms_norm_backward(torch.empty(0, 64), summed, weight, rstd)
    assert y.shape == dx.shape == (0, 64)
    assert torch.equal(dweight, torch.zeros(64))


def test_errors() -> None:
    with pytest.raises(MonarchError, match="rows of 20000 elements are too long"):
        norms.rms_norm(meta(4, 20000), meta(20000))
    with pytest.raises(MonarchError, match=r"weight is \[32\], and rows have 64"):
        norms.rms_norm(meta(4, 64), meta(32))
    with pytest.raises(MonarchError, match="must be alike"):
        norms.rms_norm(meta(4, 64), meta(64), residual=meta(1, 64))
    with pytest.raises(MonarchError, match=r"summed is \[4, 64\] and dy \[5, 64\]"):
        norms.rms_norm_backward(meta(5, 64), meta(4, 64), meta(64), meta(4))
    with pytest.raises(MonarchError, match=r"rows is \[4\] and rstd \[5\]"):
        norms.rms_norm_backward(meta(4, 64), meta(4, 64), meta(64), meta(5))


@pytest.mark.sample(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [1024, 8192])
def test_compiled(target: str, columns: int) -> None:
    x, weight, rstd = meta(4096, columns), meta(columns), meta(4096, dtype=torch.float32)
    for kernel in compiled(target, norms.rms_norm, x, weight, residual=x):
        assert_wide(kernel)
    if target == "cuda:90" or columns == 1024:
        for kernel in compiled(target, norms.layer_norm_backward, x, x, weight, rstd, rstd, dsummed=x):
            assert_wide(kernel, kinds=("load",))


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [4096, norms.MAX_COLUMNS])
def test_all_variants_compile(columns: int) -> None:
    x, weight, rstd = meta(4096, columns), meta(columns), meta(4096, dtype=torch.float32)
    for variant in norms.variants(columns):
        list(compiled("cuda:90", norms.layer_norm, x, weight, weight, residual=x, variant=variant))
    for kernel in compiled("cuda:90", norms.layer_norm_backward, x, x, weight, rstd, rstd, spills=True):
        assert spilled_bytes(kernel) <= (0 if columns < norms.MAX_COLUMNS else 64)


def _exact(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()
