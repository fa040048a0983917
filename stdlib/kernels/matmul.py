"""Matrix product with what follows it: bias, activation, residual; or the slope of an activation, in its backward.

    out = activation(a @ b + bias) + residual
    out = (a @ b) * activation'(at)

Products are summed in float32 and rounded once, at the end. A program makes a tile [M, N] of the result; programs that
run at the same time make tiles that lie together, so that their operands meet in the L2 cache (Tillet et al., "Triton",
2019). Operands are read through pointers, not through Hopper's tensor memory accelerator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant, ceil_div, launch

ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")
"""gelu is exact, through erf; gelu_tanh is the approximation 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))."""

VARIANTS = (
    Variant({"M": 128, "N": 128, "K": 64, "GROUP": 8}, 8, 3),
    Variant({"M": 128, "N": 256, "K": 64, "GROUP": 8}, 8, 3),
    Variant({"M": 128, "N": 64, "K": 64, "GROUP": 8}, 4, 4),
    Variant({"M": 64, "N": 64, "K": 64, "GROUP": 8}, 4, 4),
)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    keep: bool = False,
    tf32: bool = False,
    variant: Variant = VARIANTS[0],
) -> tuple[Tensor, Tensor | None]:
    """`(out, before)`: out [rows, columns] of a's dtype; `before`, where `keep`, what the activation was given.

    a: [rows, inner], b: [inner, columns], each contiguous along one of its dims (so b may be `weight.T`); bias:
    [columns]; residual: [rows, columns] with contiguous rows. `tf32` lets float32 matrices be multiplied as tf32.
    """
    before = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device) if keep else None
    return _matmul(a, b, bias, activation, residual, before, False, tf32, variant), before


def matmul_slope(
    a: Tensor, b: Tensor, at: Tensor, *, activation: str, tf32: bool = False, variant: Variant = VARIANTS[0]
) -> Tensor:
    """(a @ b) times the activation's derivative at `at`, [rows, columns] with contiguous rows: what `matmul` kept."""
    return _matmul(a, b, None, activation, at, None, True, tf32, variant)


def _matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str,
    beside: Tensor | None,
    before: Tensor | None,
    slope: bool,
    tf32: bool,
    variant: Variant,
) -> Tensor:
    check_activation(activation)
    (rows, inner), (found, columns) = a.shape, b.shape
    if inner != found:
        raise MonarchError(f"a is {list(a.shape)} and b {list(b.shape)}, and {inner} is not {found}")
    for name, tensor, shape in (("bias", bias, (columns,)), ("residual", beside, (rows, columns))):
        if tensor is not None and (tensor.shape != shape or tensor.stride(-1) != 1):
            raise MonarchError(f"{name} is {list(tensor.shape)}; a @ b takes {list(shape)}, with contiguous rows")
    out = torch.empty((rows, columns), dtype=a.dtype, device=a.device)
    launch(
        _product,
        (ceil_div(rows, variant.tiles["M"]) * ceil_div(columns, variant.tiles["N"]),),
        variant,
        A=a,
        B=b,
        BIAS=bias,
        BESIDE=beside,
        BEFORE=before,
        OUT=out,
        rows=rows,
        columns=columns,
        inner=inner,
        stride_am=a.stride(0),
        stride_ak=a.stride(1),
        stride_bk=b.stride(0),
        stride_bn=b.stride(1),
        stride_beside=0 if beside is None else beside.stride(0),
        EVEN=inner % variant.tiles["K"] == 0,
        ACTIVATION=activation,
        SLOPE=slope,
        PRECISION="tf32" if tf32 else "ieee",
    )
    return out


def check_activation(activation: str) -> None:
    """Raise MonarchError unless `activation` is one of ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise MonarchError(
            f"no kernel has the activation {activation!r}", hint=f"It is one of {', '.join(ACTIVATIONS)}."
        )


@triton.jit
def _product(
    A,
    B,
    BIAS,
    BESIDE,
    BEFORE,
    OUT,
    rows,
    columns,
    inner,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_beside,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs one after the other walk down GROUP tiles, then to the next column of tiles.
    down, across = tl.cdiv(rows, M), tl.cdiv(columns, N)
    band = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    row = (band * GROUP + within % height) * M + tl.arange(0, M)
    column = within // height * N + tl.arange(0, N)
    acc = multiply(
        A + row.to(tl.int64)[:, None] * stride_am,
        B + column.to(tl.int64)[None, :] * stride_bn,
        (row < rows)[:, None],
        (column < columns)[None, :],
        inner, stride_ak, stride_bk, EVEN, PRECISION, M, N, K,
    )  # fmt: skip
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None]
    if BIAS is not None:
        acc += tl.load(BIAS + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if SLOPE:
        point = tl.load(BESIDE + at * stride_beside + column[None, :], mask=inside, other=0.0).to(tl.float32)
        acc *= slope(point, ACTIVATION)
    else:
        if BEFORE is not None:
            tl.store(BEFORE + at * columns + column[None, :], acc.to(OUT.dtype.element_ty), mask=inside)
        acc = activate(acc, ACTIVATION)
        if BESIDE is not None:
            acc += tl.load(BESIDE + at * stride_beside + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + at * columns + column[None, :], acc.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def multiply(
    A,
    B,
    in_rows,
    in_columns,
    inner,
    stride_ak,
    stride_bk,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """The tile [M, N] of a product: A points to the beginnings of its rows, [M, 1], and B to those of its columns."""
    k = tl.arange(0, K)
    a_tile = A + k[None, :] * stride_ak
    b_tile = B + k[:, None] * stride_bk
    acc = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, inner, K):
        if EVEN:
            a = tl.load(a_tile, mask=in_rows, other=0.0)
            b = tl.load(b_tile, mask=in_columns, other=0.0)
        else:
            a = tl.load(a_tile, mask=in_rows & (start + k < inner)[None, :], other=0.0)
            b = tl.load(b_tile, mask=in_columns & (start + k < inner)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_tile += K * stride_ak
        b_tile += K * stride_bk
    return acc


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is the logistic function of 2 u.
        x = x * tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The activation's derivative."""
    if ACTIVATION == "none":
        return tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    else:
        s = tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
