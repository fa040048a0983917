"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.rotary import rotary, rotary_table, variants
from tests.kernels.triton.assembly import assert_wide
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta


def _exact(x: Tensor, positions: Tensor, turned: int, interleaved: bool, theta: float = 10000.0) -> Tensor:
    """Pairs as complex numbers, multiplied by exp(i * angle)."""
    angle = positions.double()[..., None] * theta ** -(torch.arange(0, turned, 2).double() / turned)
    head, rest = x.double().split([turned, x.shape[-1] - turned], dim=-1)
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    spun = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle)[:, :, None])
    return torch.cat([(spun if interleaved else spun.transpose(-1, -2)).flatten(-2), rest], dim=-1)


@pytest.mark.sample(5)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim", "turned"), [(4, 64, 64), (3, 80, 32), (5, 48, 48), (1, 6, 2)])
def test_rotary(heads: int, dim: int, turned: int, dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(2, 5, heads, dim).to(dtype)
    positions = torch.randint(0, 50, (2, 5))
    table = rotary_table(50, turned)
    with launching():
        y = rotary(x, table, positions, interleaved=interleaved)
        back = rotary(y, table, positions, interleaved=interleaved, inverse=True)
        counted = rotary(x, table, interleaved=interleaved)
    assert_near(y, _exact(x, positions, turned, interleaved))
    assert_near(back, x.double(), scale=2)
    assert_near(counted, _exact(x, torch.arange(5).expand(2, 5), turned, interleaved))
    assert torch.equal(y[..., turned:], x[..., turned:])


def test_part_of_a_packed_tensor_in_place() -> None:
    packed = torch.randn(2, 4, 9, 16)  # 6 heads of queries, 2 of keys, 1 of values
    before, table = packed.clone(), rotary_table(4, 16)
    heads = packed[:, :, :8]
    with launching():
        assert rotary(heads, table, out=heads) is heads
    assert_near(packed[:, :, :8], _exact(before[:, :, :8], torch.arange(4).expand(2, 4), 16, False))
    assert torch.equal(packed[:, :, 8], before[:, :, 8])


def test_the_inverse_is_the_gradient() -> None:
    x, dy = torch.randn(2, 1, 3, 2, 8)
    leaf = x.double().requires_grad_()
    _exact(leaf, torch.arange(3)[None], 8, False).backward(dy.double())
    with launching():
        dx = rotary(dy, rotary_table(3, 8), inverse=True)
    assert leaf.grad is not None
    assert_near(dx, leaf.grad)


def test_errors() -> None:
    with pytest.raises(MonarchError, match=r"x is \[1, 8, 2, 16\] and out \[1, 8, 1, 16\]"):
        rotary(meta(1, 8, 2, 16), rotary_table(8, 16, device="meta"), out=meta(1, 8, 1, 16))
    with pytest.raises(MonarchError, match="sequences have 9 positions, and the table 8"):
        rotary(meta(1, 9, 2, 16), rotary_table(8, 16, device="meta"))
    with pytest.raises(MonarchError, match="turns up to dim elements"):
        rotary(meta(1, 8, 2, 16), rotary_table(8, 32, device="meta"))
    with pytest.raises(MonarchError, match=r"positions are \[8\], and x has 1 sequences of 8"):
        rotary(meta(1, 8, 2, 16), rotary_table(8, 16, device="meta"), meta(8))


@pytest.mark.sample(2)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("target", TARGETS)
def test_compiled(target: str, interleaved: bool) -> None:
    x, table = meta(4, 2048, 40, 128), rotary_table(2048, 128, device="meta")
    for variant in variants(40, 128)[: None if target == "cuda:90" else 1]:
        for kernel in compiled(target, rotary, x, table, interleaved=interleaved, variant=variant):
            assert_wide(kernel)
