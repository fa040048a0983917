"""Tensors in 8 bits with a scale for each block of elements, for collectives that send less.

    scale = largest |x| of the block / largest value of the type;   q = round(x / scale);   x ≈ q * scale

int8 (127 steps each way, rounded to nearest even) or an 8-bit float: float8_e4m3fn and float8_e5m2 on NVIDIA GPUs from
compute capability 8.9, their fnuz kin on the MI300; scales are float32. An all_reduce over n workers is then: quantize,
all_to_all, `dequantize_sum` of the n parts, quantize, all_gather, dequantize (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", 2022, for the blocks). A block with a value that is not finite becomes NaN whole: an overflow
stays visible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant, ceil_div, launch

LARGEST = {torch.int8: 127.0} | {
    dtype: torch.finfo(dtype).max
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
}

VARIANTS = (Variant({"BLOCKS": 16}, 8, 1), Variant({"BLOCKS": 8}, 4, 1), Variant({"BLOCKS": 16}, 4, 1))


def quantize(
    x: Tensor, dtype: torch.dtype = torch.int8, *, block: int = 256, variant: Variant = VARIANTS[0]
) -> tuple[Tensor, Tensor]:
    """`(q, scales)`: q like x, contiguous, in `dtype`; scales float32, one for each `block` elements, a power of 2, of
    x.

    x is contiguous; its last block may be short.
    """
    if dtype not in LARGEST:
        raise MonarchError(f"cannot quantize to {dtype}", hint=f"It is one of {', '.join(map(str, LARGEST))}.")
    _check_block(block, x)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(ceil_div(x.numel(), block), dtype=torch.float32, device=x.device)
    launch(
        _quantize,
        (ceil_div(scales.numel(), variant.tiles["BLOCKS"]),),
        variant,
        X=x,
        Q=q,
        SCALES=scales,
        size=x.numel(),
        largest=LARGEST[dtype],
        INTEGER=dtype == torch.int8,
        SIZE=block,
    )
    return q, scales


def dequantize(
    q: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, *, block: int = 256, variant: Variant = VARIANTS[0]
) -> Tensor:
    """What `quantize` was given, up to half a step (int8) or half a unit in the last place (fp8), in `dtype`."""
    return dequantize_sum(q[None], scales[None], dtype, block=block, variant=variant)


def dequantize_sum(
    q: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, *, block: int = 256, variant: Variant = VARIANTS[0]
) -> Tensor:
    """The sum of `parts` tensors, added up in float32 from the first to the last: the same bits on every worker.

    q: [parts, ...], scales: [parts, blocks], both contiguous.
    """
    _check_block(block, q)
    blocks = ceil_div(q[0].numel(), block)
    if scales.shape != (q.shape[0], blocks):
        raise MonarchError(f"scales are {list(scales.shape)}, and q takes {[q.shape[0], blocks]} for blocks of {block}")
    out = torch.empty(q.shape[1:], dtype=dtype, device=q.device)
    launch(
        _dequantize,
        (ceil_div(blocks, variant.tiles["BLOCKS"]),),
        variant,
        Q=q,
        SCALES=scales,
        OUT=out,
        parts=q.shape[0],
        size=out.numel(),
        blocks=blocks,
        SIZE=block,
    )
    return out


def _check_block(block: int, x: Tensor) -> None:
    if block < 16 or block & (block - 1):
        raise MonarchError(f"blocks have a power of 2 of elements, at least 16; not {block}")
    if not x.is_contiguous():
        raise MonarchError(
            f"a tensor with strides {list(x.stride())} has no blocks of neighbours", hint="x.contiguous()"
        )


@triton.jit
def _quantize(X, Q, SCALES, size, largest, INTEGER: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(X + at, mask=at < size, other=0.0).to(tl.float32)
    # tl.max passes over NaN; 0 * x keeps it, and makes it of an infinity.
    scale = (tl.max(tl.abs(x), axis=1) + tl.sum(0.0 * x, axis=1)) / largest
    tl.store(SCALES + block, scale, mask=block * SIZE < size)
    q = x * tl.where(scale > 0.0, 1.0 / scale, 0.0)[:, None]
    if INTEGER:
        # Added and taken away again, 1.5 * 2^23 leaves the nearest integer, to even of two.
        q = (q + 12582912.0) - 12582912.0
    q = tl.minimum(tl.maximum(q, -largest), largest)
    tl.store(Q + at, q.to(Q.dtype.element_ty), mask=at < size)


@triton.jit
def _dequantize(Q, SCALES, OUT, parts, size, blocks, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros([BLOCKS, SIZE], dtype=tl.float32)
    q, scales = Q, SCALES
    for _ in range(parts):
        scale = tl.load(scales + block, mask=block < blocks, other=0.0)
        total += tl.load(q + at, mask=at < size).to(tl.float32) * scale[:, None]
        q += size
        scales += blocks
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=at < size)
