"""The gradients of attention against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.attention import Packed, attention
from monarch.stdlib.kernels.attention_backward import attention_backward, key_variants, query_variants
from monarch.stdlib.kernels.launch import Launch, Variant, recorded
from tests.compiler.kernels.triton.assembly import assert_tensor_cores, assert_wide, spilled_bytes
from tests.stdlib.kernels.exact_attention import LENGTHS, MASKS, attention_inputs, exact_attention, starts
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

SMALL = {"key_variant": Variant({"M": 16, "N": 32}, 4, 2), "query_variant": Variant({"M": 32, "N": 16}, 4, 2)}


def _exact(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **settings: object) -> tuple[Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = exact_attention(*leaves, **settings)
    return torch.autograd.grad(out, leaves, dout.double())


def _check(gradients: tuple[Tensor, ...], exact: tuple[Tensor, ...], scale: float) -> None:
    """Errors are relative to the largest element of all three: some are differences of large numbers, and may be 0."""
    assert [g.shape for g in gradients] == [e.shape for e in exact]
    assert_near(*(torch.cat([g.flatten() for g in three]) for three in (gradients, exact)), scale=scale)


@pytest.mark.sample(3)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("q_length", "k_length"), LENGTHS[1:4], ids=str)
def test_masks_and_lengths(q_length: int, k_length: int, mask: dict) -> None:
    q, k, v = attention_inputs(q_length, k_length, 1, 1, 16, torch.float32)
    dout = torch.randn_like(q)
    with launching():
        out, lse = attention(q, k, v, **mask)
        gradients = attention_backward(dout, q, k, v, out, lse, **mask, **SMALL)
    _check(gradients, _exact(dout, q, k, v, **mask), 8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 64), (3, 1, 80), (2, 2, 128)])
def test_heads_and_dims(heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v = attention_inputs(40, 70, heads, key_heads, dim, dtype)
    dout = torch.randn_like(q)
    with launching():
        out, lse = attention(q, k, v, causal=True, scale=0.1)
        gradients = attention_backward(dout, q, k, v, out, lse, causal=True, scale=0.1)
    _check(gradients, _exact(dout, q, k, v, causal=True, scale=0.1), 8 if dtype == torch.float32 else 2)


def test_packed_sequences() -> None:
    q_lengths, k_lengths = [5, 0, 40, 33], [5, 7, 64, 20]
    q, k, v = torch.randn(sum(q_lengths), 2, 16), *torch.randn(2, sum(k_lengths), 1, 16)
    dout = torch.randn_like(q)
    packed = Packed(starts(q_lengths), starts(k_lengths), 40, 64)
    with launching():
        out, lse = attention(q, k, v, causal=True, window=30, packed=packed)
        gradients = attention_backward(dout, q, k, v, out, lse, causal=True, window=30, packed=packed, **SMALL)
    split = (dout.split(q_lengths), q.split(q_lengths), k.split(k_lengths), v.split(k_lengths))
    exact = [_exact(*(x[None] for x in one), causal=True, window=30) for one in zip(*split, strict=True)]
    _check(gradients, tuple(torch.cat([one[i][0] for one in exact]) for i in range(3)), 8)


def test_strided_operands() -> None:
    packed = torch.randn(2, 4, 50, 3 * 16)
    q, k, v = packed.transpose(1, 2).split(16, dim=-1)
    dout = torch.randn(2, 50, 16, 4).transpose(2, 3)
    with launching():
        out, lse = attention(q, k, v)
        gradients = attention_backward(dout, q, k, v, out, lse, **SMALL)
    _check(gradients, _exact(dout, q, k, v), 8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_variant_gives_the_same(dim: int) -> None:
    q, k, v = attention_inputs(70, 150, 1, 1, dim, torch.float32)
    dout = torch.randn_like(q)
    exact = _exact(dout, q, k, v, causal=True)
    with launching():
        out, lse = attention(q, k, v, causal=True)
        for keys, queries in zip(key_variants(dim), query_variants(dim), strict=True):
            chosen = {"key_variant": keys, "query_variant": queries}
            _check(attention_backward(dout, q, k, v, out, lse, causal=True, **chosen), exact, 8)


def test_errors() -> None:
    q, lse = meta(2, 8, 6, 64), meta(2, 6, 8)
    with pytest.raises(MonarchError, match=r"q is \[2, 8, 6, 64\] and dout \[2, 8, 3, 64\]"):
        attention_backward(meta(2, 8, 3, 64), q, q, q, q, lse)
    with pytest.raises(MonarchError, match=r"lse_of_q is \[2, 6, 8\] and lse \[2, 8, 6\]"):
        attention_backward(q, q, q, q, q, lse.transpose(1, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled(target: str) -> None:
    dim = 128 if target == "cuda:90" else 64
    q, k, lse = meta(4, 2048, 32, dim), meta(4, 2048, 8, dim), meta(4, 32, 2048, dtype=torch.float32)
    products, *walks = compiled(target, attention_backward, q, q, k, k, q, lse, causal=True, spills=target != "cuda:90")
    assert_wide(products, kinds=("load",))
    for kernel in walks:
        assert_tensor_cores(kernel)
        assert_wide(kernel, kinds=("load",))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_variants_compile(dim: int) -> None:
    q, lse = meta(4, 2048, 8, dim), meta(4, 8, 2048, dtype=torch.float32)
    for keys, queries in zip(key_variants(dim), query_variants(dim), strict=True):
        chosen = {"key_variant": keys, "query_variant": queries, "causal": True}
        _, launches = recorded(attention_backward, q, q, q, q, q, lse, **chosen)
        for launch in launches[1:]:
            _check_kernel(launch)


def test_packed_windows_compile() -> None:
    q, lse, begins = meta(8192, 8, 64), meta(8, 8192, dtype=torch.float32), meta(9, dtype=torch.int32)
    settings = {"causal": True, "window": 1024, "packed": Packed(begins, begins, 2048, 2048)}
    _, launches = recorded(attention_backward, q, q, q, q, q, lse, **settings)
    for launch in launches[1:]:
        _check_kernel(launch)


def _check_kernel(launch: Launch) -> None:
    kernel = launch.compile("cuda:90")
    assert_tensor_cores(kernel)
    assert spilled_bytes(kernel) <= 24, f"{kernel.name} {launch.variant}: {spilled_bytes(kernel)}"
    assert kernel.shared_bytes <= 227 * 1024
