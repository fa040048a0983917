"""One matrix product for each expert of a mixture, over the tokens that were sent to it, in one launch.

    out[tokens of expert e] = activation(x[tokens of expert e] @ weights[e] + bias[e])

Tokens are sorted by expert. How many each has is known on the device only (`starts`), so as many programs are launched
as there can be tiles, each finds its expert by counting tiles, and those left over end at once (Gale et al.,
"MegaBlocks", 2023, computes the same products as a block-sparse one). No token is padded or dropped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant, ceil_div, check_alike, launch, next_power_of_2
from monarch.stdlib.kernels.matmul import activate, check_activation, multiply

VARIANTS = (
    Variant({"M": 128, "N": 128, "K": 64, "GROUP": 4}, 8, 3),
    Variant({"M": 64, "N": 128, "K": 64, "GROUP": 4}, 4, 3),
    Variant({"M": 64, "N": 256, "K": 64, "GROUP": 2}, 8, 3),
)

GRADIENT_VARIANTS = (Variant({"M": 128, "N": 128, "K": 64}, 8, 3), Variant({"M": 64, "N": 128, "K": 64}, 4, 3))


def grouped_matmul(
    x: Tensor,
    weights: Tensor,
    starts: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    tf32: bool = False,
    variant: Variant = VARIANTS[0],
) -> Tensor:
    """[tokens, columns] of x's dtype.

    x: [tokens, inner] with contiguous rows; weights: [experts, inner, columns], contiguous along one of the last two
    dims (`weights.mT` gives the gradient of x); starts: int32 [experts + 1], where each expert's tokens begin, the last
    entry the number of tokens; bias: [experts, columns], contiguous.
    """
    check_activation(activation)
    (tokens, inner), (experts, found, columns) = x.shape, weights.shape
    if inner != found or starts.shape != (experts + 1,) or x.stride(1) != 1:
        raise MonarchError(
            f"x is {list(x.shape)}, weights {list(weights.shape)} and starts {list(starts.shape)}",
            hint="They are [tokens, inner] with contiguous rows, [experts, inner, columns] and [experts + 1].",
        )
    check_alike(weights_of_one_input=weights[:, 0], bias=bias)
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    tiles = ceil_div(tokens, variant.tiles["M"]) + experts
    launch(
        _products,
        (tiles * ceil_div(columns, variant.tiles["N"]) if tokens else 0,),
        variant,
        X=x,
        WEIGHTS=weights,
        BIAS=bias,
        STARTS=starts,
        OUT=out,
        tiles=tiles,
        columns=columns,
        inner=inner,
        stride_x=x.stride(0),
        stride_we=weights.stride(0),
        stride_wk=weights.stride(1),
        stride_wn=weights.stride(2),
        EXPERTS=experts,
        PADDED=next_power_of_2(experts),
        EVEN=inner % variant.tiles["K"] == 0,
        ACTIVATION=activation,
        PRECISION="tf32" if tf32 else "ieee",
    )
    return out


def grouped_matmul_gradient(
    x: Tensor, dout: Tensor, starts: Tensor, *, tf32: bool = False, variant: Variant = GRADIENT_VARIANTS[0]
) -> Tensor:
    """The gradient of the weights: for each expert, its tokens' xᵀ @ dout; [experts, inner, columns], of x's dtype."""
    (tokens, inner), columns, experts = x.shape, dout.shape[1], starts.shape[0] - 1
    if dout.shape[0] != tokens or x.stride(1) != 1 or dout.stride(1) != 1:
        raise MonarchError(
            f"x is {list(x.shape)} and dout {list(dout.shape)}; both are [tokens, …], with contiguous rows"
        )
    out = torch.empty((experts, inner, columns), dtype=x.dtype, device=x.device)
    launch(
        _gradient,
        (ceil_div(inner, variant.tiles["M"]), ceil_div(columns, variant.tiles["N"]), experts),
        variant,
        X=x,
        DOUT=dout,
        STARTS=starts,
        OUT=out,
        columns=columns,
        inner=inner,
        stride_x=x.stride(0),
        stride_d=dout.stride(0),
        PRECISION="tf32" if tf32 else "ieee",
    )
    return out


@triton.jit
def _products(
    X,
    WEIGHTS,
    BIAS,
    STARTS,
    OUT,
    tiles,
    columns,
    inner,
    stride_x,
    stride_we,
    stride_wk,
    stride_wn,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # GROUP tiles across, then down over all tokens: what is read of x and of the weights is read again soon.
    across = tl.cdiv(columns, N)
    band = tl.program_id(0) // (GROUP * tiles)
    width = tl.minimum(across - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles)
    number = within // width
    column = (band * GROUP + within % width) * N + tl.arange(0, N)
    each = tl.arange(0, PADDED)
    begin = tl.load(STARTS + each, mask=each < EXPERTS, other=0)
    count = tl.cdiv(tl.load(STARTS + each + 1, mask=each < EXPERTS, other=0) - begin, M)
    before = tl.cumsum(count, axis=0) - count
    mine = (number >= before) & (number < before + count)
    if tl.sum(mine.to(tl.int32), axis=0) == 0:
        return
    expert = tl.sum(tl.where(mine, each, 0), axis=0)
    first = tl.sum(tl.where(mine, begin + (number - before) * M, 0), axis=0)
    end = tl.load(STARTS + expert + 1)
    row = first + tl.arange(0, M)
    weights = WEIGHTS + expert.to(tl.int64) * stride_we
    acc = multiply(
        X + row.to(tl.int64)[:, None] * stride_x,
        weights + column.to(tl.int64)[None, :] * stride_wn,
        (row < end)[:, None],
        (column < columns)[None, :],
        inner, 1, stride_wk, EVEN, PRECISION, M, N, K,
    )  # fmt: skip
    if BIAS is not None:
        acc += tl.load(BIAS + expert * columns + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION)
    out = OUT + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


@triton.jit
def _gradient(
    X,
    DOUT,
    STARTS,
    OUT,
    columns,
    inner,
    stride_x,
    stride_d,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    expert = tl.program_id(2)
    begin, end = tl.load(STARTS + expert), tl.load(STARTS + expert + 1)
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    token = tl.arange(0, K)
    x_tile = X + begin.to(tl.int64) * stride_x + token[:, None] * stride_x + row[None, :]
    d_tile = DOUT + begin.to(tl.int64) * stride_d + token[:, None] * stride_d + column[None, :]
    acc = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, end - begin, K):
        here = (start + token < end - begin)[:, None]
        x = tl.load(x_tile, mask=here & (row < inner)[None, :], other=0.0)
        d = tl.load(d_tile, mask=here & (column < columns)[None, :], other=0.0)
        acc = tl.dot(tl.trans(x), d, acc, input_precision=PRECISION)
        x_tile += K * stride_x
        d_tile += K * stride_d
    out = OUT + (expert.to(tl.int64) * inner + row[:, None]) * columns + column[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=(row < inner)[:, None] & (column < columns)[None, :])
