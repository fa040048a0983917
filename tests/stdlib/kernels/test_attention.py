"""Attention against float64, with every kind of mask, shared key heads, and packed sequences: forward."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.attention import Packed, attention, variants
from monarch.stdlib.kernels.launch import Variant
from tests.compiler.kernels.triton.assembly import assert_tensor_cores, assert_wide, spilled_bytes
from tests.stdlib.kernels.exact_attention import LENGTHS, MASKS, attention_inputs, exact_attention, starts
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

SMALL = Variant({"M": 32, "N": 16}, 4, 2)
"""Tiles of which small sequences have several, of each kind: unmasked, at the diagonal, at the window's edge, at the
end."""


@pytest.mark.sample(6)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("q_length", "k_length"), LENGTHS, ids=str)
def test_masks_and_lengths(q_length: int, k_length: int, mask: dict) -> None:
    q, k, v = attention_inputs(q_length, k_length, 1, 1, 16, torch.float32)
    with launching():
        out, lse = attention(q, k, v, **mask, variant=SMALL)
    exact, exact_lse = exact_attention(q, k, v, **mask)
    assert_near(out, exact, scale=4)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert_near(lse.nan_to_num(neginf=0.0), exact_lse.nan_to_num(neginf=0.0))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 64), (3, 1, 80), (2, 2, 128)])
def test_heads_and_dims(heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v = attention_inputs(40, 70, heads, key_heads, dim, dtype)
    with launching():
        out, lse = attention(q, k, v, causal=True, scale=0.2)
    exact, exact_lse = exact_attention(q, k, v, causal=True, scale=0.2)
    assert_near(out, exact, scale=4 if dtype == torch.float32 else 1.5)
    assert_near(lse, exact_lse, scale=4)


def test_packed_sequences() -> None:
    q_lengths, k_lengths = [5, 0, 40, 33], [5, 7, 64, 20]
    q, k, v = torch.randn(sum(q_lengths), 2, 16), *torch.randn(2, sum(k_lengths), 1, 16)
    packed = Packed(starts(q_lengths), starts(k_lengths), 40, 64)
    with launching():
        out, lse = attention(q, k, v, causal=True, window=30, packed=packed, variant=SMALL)
    sequences = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    exact = [exact_attention(a[None], b[None], c[None], causal=True, window=30) for a, b, c in sequences]
    assert_near(out, torch.cat([out[0] for out, _ in exact]), scale=4)
    assert_near(lse.nan_to_num(neginf=0.0), torch.cat([lse[0] for _, lse in exact], dim=1).nan_to_num(neginf=0.0))


def test_strided_operands() -> None:
    packed = torch.randn(2, 4, 50, 3 * 16)  # heads before length, and q, k, v beside each other
    q, k, v = packed.transpose(1, 2).split(16, dim=-1)
    with launching():
        out, _ = attention(q, k, v)
    assert_near(out, exact_attention(q, k, v)[0], scale=4)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (100 * x for x in attention_inputs(20, 20, 1, 1, 16, torch.float32))
    with launching():
        out, _ = attention(q, k, v, causal=True, variant=SMALL)
    assert_near(out, exact_attention(q, k, v, causal=True)[0], scale=2**8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_variant_gives_the_same(dim: int) -> None:
    q, k, v = attention_inputs(130, 150, 1, 1, dim, torch.float32)
    exact, _ = exact_attention(q, k, v, causal=True)
    with launching():
        for variant in variants(dim):
            assert_near(attention(q, k, v, causal=True, variant=variant)[0], exact, scale=4)


def test_errors() -> None:
    q, k = meta(2, 8, 6, 64), meta(2, 8, 4, 64)
    with pytest.raises(MonarchError, match="6 heads of queries cannot share 4 heads of keys"):
        attention(q, k, k)
    with pytest.raises(MonarchError, match="needs causal=True"):
        attention(q, q, q, window=4)
    with pytest.raises(MonarchError, match="do not fit each other"):
        attention(q, q, meta(2, 9, 6, 64))
    with pytest.raises(MonarchError, match="different batches"):
        attention(q, meta(3, 8, 6, 64), meta(3, 8, 6, 64))
    with pytest.raises(MonarchError, match="at most 256 elements"):
        attention(*[meta(2, 8, 6, 512)] * 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
def test_forward_compiled(target: str) -> None:
    dim = 64 if target in ("cuda:100", "gfx942") else 128
    q, k = meta(4, 2048, 32, dim), meta(4, 2048, 8, dim)
    for kernel in compiled(target, attention, q, k, k, causal=True):
        assert_tensor_cores(kernel)
        assert_wide(kernel, kinds=("load",))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_forward_variants_compile(dim: int) -> None:
    q, begins = meta(8192, 8, dim), meta(9, dtype=torch.int32)
    packed = Packed(begins, begins, 2048, 2048)
    for variant in variants(dim):
        settings = {"causal": True, "packed": packed, "variant": variant, "spills": True}
        settings |= {"window": 1024} if variant == variants(64)[0] else {}
        (kernel,) = compiled("cuda:90", attention, q, q, q, **settings)
        assert_tensor_cores(kernel)
        assert_wide(kernel)
        assert spilled_bytes(kernel) <= (128 if variant != variants(dim)[0] else 0)
        assert kernel.shared_bytes <= 227 * 1024
