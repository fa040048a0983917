"""Blockwise 8-bit tensors: exact against the formula, and close to what they stand for."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.quantize import LARGEST, VARIANTS, dequantize, dequantize_sum, quantize
from tests.kernels.triton.assembly import assert_wide
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

SHAPES = [(1024,), (3, 500), (17,), (5, 7, 256)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("to", LARGEST, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(shape: tuple[int, ...], dtype: torch.dtype, to: torch.dtype) -> None:
    x = (torch.randn(shape) * torch.randn(shape[-1]).exp()).to(dtype)
    with launching():
        q, scales = quantize(x, to, block=64)
        back = dequantize(q, scales, block=64)
    assert q.shape == back.shape == x.shape and q.dtype == to
    blocks = [block.double() for block in x.flatten().split(64)]
    largest = torch.stack([block.abs().max() for block in blocks])
    assert_near(scales, largest / LARGEST[to])
    step = largest / 127 if to == torch.int8 else largest * 2.0 ** (-3 if "e4m3" in str(to) else -2)
    for block, found, size in zip(blocks, back.flatten().double().split(64), step, strict=True):
        assert (block - found).abs().max() <= 0.501 * size


def test_rounding_is_to_nearest_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0] + [0.0] * 8)
    with launching():
        q, scales = quantize(x, block=16)
    assert scales.tolist() == [1.0]
    assert q[:8].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]


def test_zeros_and_tiny_values() -> None:
    x = torch.zeros(64)
    x[16:32] = 1e-30
    with launching():
        q, scales = quantize(x, block=16)
        back = dequantize(q, scales, block=16)
    assert_near(back, x.double())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_is_not_finite_is_not_lost(to: torch.dtype, bad: float) -> None:
    x = torch.randn(64)
    x[20] = bad
    with launching():
        back = dequantize(*quantize(x, to, block=16), block=16)
    assert back[16:32].isnan().all()
    assert back[:16].isfinite().all() and back[32:].isfinite().all()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_parts(out: torch.dtype) -> None:
    parts = torch.randn(4, 10, 60)
    with launching():
        packed = [quantize(part, block=32) for part in parts]
        q, scales = torch.stack([q for q, _ in packed]), torch.stack([s for _, s in packed])
        total = dequantize_sum(q, scales, out, block=32)
        each = torch.stack([dequantize(*one, block=32) for one in packed])
    assert_near(total, each.double().sum(0))


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_all_reduce_of_8_bit_blocks(to: torch.dtype) -> None:
    """Four workers' parts of the exchange, one after the other: each sums a quarter, and all get all quarters."""
    workers, size = 4, 512
    x = torch.randn(workers, workers * size)
    with launching():
        sent = [[quantize(part, to, block=64) for part in own.split(size)] for own in x]
        sums = []
        for quarter in range(workers):
            q, scales = (torch.stack([sent[worker][quarter][i] for worker in range(workers)]) for i in (0, 1))
            sums.append(quantize(dequantize_sum(q, scales, block=64), to, block=64))
        total = torch.cat([dequantize(q, scales, block=64) for q, scales in sums])
    exact = x.double().sum(0)
    steps = x.abs().amax(1).sum() + exact.abs().max()  # what is rounded on the way: each worker's part, then the sum
    assert (total.double() - exact).abs().max() <= steps * (0.5 / 127 if to == torch.int8 else 2.0**-4)
    assert (total.double() - exact).norm() <= 0.04 * exact.norm()


def test_every_variant_gives_the_same() -> None:
    x = torch.randn(5000)
    with launching():
        q, scales = quantize(x)
        for variant in VARIANTS:
            again = quantize(x, variant=variant)
            assert torch.equal(again[0], q) and torch.equal(again[1], scales)


def test_errors() -> None:
    with pytest.raises(MonarchError, match="cannot quantize to torch.int16"):
        quantize(meta(64), torch.int16)
    with pytest.raises(MonarchError, match="a power of 2 of elements, at least 16; not 48"):
        quantize(meta(64), block=48)
    with pytest.raises(MonarchError, match="no blocks of neighbours"):
        quantize(meta(64, 2)[:, 0])
    with pytest.raises(MonarchError, match=r"scales are \[2, 3\], and q takes \[2, 4\]"):
        dequantize_sum(meta(2, 64), meta(2, 3), block=16)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled(target: str) -> None:
    fp8 = {"cuda:80": torch.float8_e5m2, "gfx942": torch.float8_e4m3fnuz}.get(target, torch.float8_e4m3fn)
    x = meta(4096, 1024)
    for to in (torch.int8, fp8):
        for variant in VARIANTS[: None if target == "cuda:90" else 1]:
            for kernel in compiled(target, quantize, x, to, variant=variant):
                assert_wide(kernel, kinds=("load",))
    scales = meta(4, 4096 * 4, dtype=torch.float32)
    for kernel in compiled(target, dequantize_sum, meta(4, 4096, 1024, dtype=torch.int8), scales, torch.bfloat16):
        assert_wide(kernel, kinds=("store",))
