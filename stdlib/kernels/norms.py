"""RMSNorm and LayerNorm, with the addition to the residual stream before them, forward and backward.

    summed = x + residual                                  rounded to x's dtype, as the residual stream is stored
    rms:    y = summed * rstd * weight                     rstd = 1 / sqrt(mean(summed²) + eps)
    layer:  y = (summed - mean) * rstd * weight + bias     rstd = 1 / sqrt(mean((summed - mean)²) + eps)

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Ba et al., "Layer Normalization", 2016. A program
holds whole rows in registers, so that each element is read once; all is computed in float32. The gradients of weight
and bias are summed over rows in two steps, in a fixed order: each program over its own rows, then over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant, ceil_div, check_alike, launch, next_power_of_2

MAX_COLUMNS = 16384
"""Longer rows do not fit into a program's registers."""

FUSED_COLUMNS = 4096
"""Up to here the backward's sums over rows stay in registers too."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None, variant: Variant | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(y, summed, rstd)`: y and summed like x, rstd float32 with x's leading dims. `summed` is x without a residual.

    x: [..., columns], of any strides but 1 in the last dim; weight: [columns]; residual: like x.
    """
    y, summed, _, rstd = _norm(x, weight, None, eps, residual, variant, centred=False)
    return y, summed, rstd


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(y, summed, mean, rstd)`: as `rms_norm`, with mean like rstd."""
    y, summed, mean, rstd = _norm(x, weight, bias, eps, residual, variant, centred=True)
    assert mean is not None
    return y, summed, mean, rstd


def rms_norm_backward(
    dy: Tensor,
    summed: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    dsummed: Tensor | None = None,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """`(dx, dweight)`: dx is also the residual's gradient. `dsummed`: what reaches `summed` from its other readers."""
    dx, dweight, _ = _norm_backward(dy, summed, weight, None, rstd, dsummed, variant, bias=False)
    return dx, dweight


def layer_norm_backward(
    dy: Tensor,
    summed: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    bias: bool = True,
    dsummed: Tensor | None = None,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(dx, dweight, dbias)`, dbias None where `bias` is False."""
    return _norm_backward(dy, summed, weight, mean, rstd, dsummed, variant, bias=bias)


def variants(columns: int) -> tuple[Variant, ...]:
    """Tiles of whole rows, with 8 to 32 elements for each thread."""
    block = max(16, next_power_of_2(columns))
    shapes = [(4, 16), (8, 16), (4, 8), (8, 8), (8, 32), (16, 32)]
    found = [
        Variant({"ROWS": min(64, 32 * warps * elements // block), "BLOCK": block}, warps, 1)
        for warps, elements in shapes
        if 32 * warps * elements >= block
    ]
    return tuple(found)


PROGRAMS = 264
"""Programs that share the backward's rows, each with partial sums: two for each multiprocessor of an H100."""

COLUMN_TILES = Variant({"ROWS": 64, "BLOCK": 64}, 4, 1)
"""For sums over rows, which are read in pieces of rows."""


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    variant: Variant | None,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    rows, added = _rows(x), None if residual is None else _rows(residual)
    count, columns = rows.shape
    _check(columns, weight, bias)
    check_alike(x=x, residual=residual)
    variant = variant or variants(columns)[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x if added is None else torch.empty_like(y)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else None
    launch(
        _forward,
        (ceil_div(count, variant.tiles["ROWS"]),),
        variant,
        X=rows,
        RESIDUAL=added,
        WEIGHT=weight,
        BIAS=bias,
        Y=y,
        SUMMED=None if added is None else summed,
        MEAN=mean,
        RSTD=rstd,
        rows=count,
        columns=columns,
        stride_x=rows.stride(0),
        stride_residual=0 if added is None else added.stride(0),
        eps=float(eps),
    )
    return y, summed, mean, rstd


def _norm_backward(
    dy: Tensor,
    summed: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    dsummed: Tensor | None,
    variant: Variant | None,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    check_alike(summed=summed, dy=dy, dsummed=dsummed)
    check_alike(rows=summed[..., 0], rstd=rstd, mean=mean)
    gradient, rows = _rows(dy), _rows(summed)
    passed = None if dsummed is None else _rows(dsummed)
    count, columns = rows.shape
    _check(columns, weight, None)
    variant = variant or variants(columns)[0]
    fused = columns <= FUSED_COLUMNS
    height = variant.tiles["ROWS"] if fused else COLUMN_TILES.tiles["ROWS"]
    chunk = ceil_div(ceil_div(count, height), PROGRAMS) * height
    programs = ceil_div(count, chunk) if count else 0
    dx = torch.empty(summed.shape, dtype=summed.dtype, device=summed.device)
    partial = torch.empty((1 + bias, programs, columns), dtype=torch.float32, device=summed.device)
    sums = {"DWEIGHT": partial[0], "DBIAS": partial[1] if bias else None}
    read = {"DY": gradient, "X": rows, "MEAN": mean, "RSTD": rstd, "rows": count, "columns": columns}
    strides = {"stride_dy": gradient.stride(0), "stride_x": rows.stride(0)}
    launch(
        _backward,
        (programs,) if fused else (ceil_div(count, variant.tiles["ROWS"]),),
        variant,
        **read,
        WEIGHT=weight,
        DSUMMED=passed,
        DX=dx,
        **(sums if fused else {"DWEIGHT": None, "DBIAS": None}),
        chunk=chunk if fused else variant.tiles["ROWS"],
        **strides,
        stride_dsummed=0 if passed is None else passed.stride(0),
    )
    if not fused:
        grid = (programs, ceil_div(columns, COLUMN_TILES.tiles["BLOCK"]))
        launch(_column_sums, grid, COLUMN_TILES, **read, **sums, chunk=chunk, **strides)
    dweight = torch.empty_like(weight)
    dbias = torch.empty_like(weight) if bias else None
    for out, sum_ in ((dweight, partial[0]), (dbias, partial[-1])):
        if out is not None:
            blocks = ceil_div(columns, COLUMN_TILES.tiles["BLOCK"])
            launch(_add_partials, (blocks,), COLUMN_TILES, PARTIAL=sum_, OUT=out, programs=programs, columns=columns)
    return dx, dweight, dbias


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _check(columns: int, weight: Tensor, bias: Tensor | None) -> None:
    if columns > MAX_COLUMNS:
        raise MonarchError(
            f"rows of {columns} elements are too long for the norm kernels, which hold {MAX_COLUMNS} at most",
            hint="Leave this norm to ATen.",
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (columns,):
            raise MonarchError(f"{name} is {list(tensor.shape)}, and rows have {columns} elements")


@triton.jit
def _forward(
    X,
    RESIDUAL,
    WEIGHT,
    BIAS,
    Y,
    SUMMED,
    MEAN,
    RSTD,
    rows,
    columns,
    stride_x,
    stride_residual,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    at = row.to(tl.int64)[:, None]
    x = tl.load(X + at * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        x += tl.load(RESIDUAL + at * stride_residual + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(SUMMED.dtype.element_ty)
        tl.store(SUMMED + at * columns + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if MEAN is not None:
        mean = tl.sum(x, axis=1) / columns
        tl.store(MEAN + row, mean, mask=row < rows)
        x = tl.where(column < columns, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / columns + eps)
    tl.store(RSTD + row, rstd, mask=row < rows)
    y = x * rstd[:, None] * tl.load(WEIGHT + column, mask=column < columns, other=0.0).to(tl.float32)
    if BIAS is not None:
        y += tl.load(BIAS + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(Y + at * columns + column, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    DY,
    X,
    MEAN,
    RSTD,
    rows,
    columns,
    WEIGHT,
    DSUMMED,
    DX,
    DWEIGHT,
    DBIAS,
    chunk,
    stride_dy,
    stride_x,
    stride_dsummed,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx for the program's rows, and what they add to the gradients of weight and bias."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(WEIGHT + column, mask=column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, chunk, ROWS):
        row = program * chunk + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)
        at = row.to(tl.int64)[:, None]
        dy = tl.load(DY + at * stride_dy + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + at * stride_x + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)[:, None]
        weighted = weight * dy
        if MEAN is not None:
            x -= tl.load(MEAN + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.where(inside, x, 0.0) * rstd
        dx = weighted - normed * (tl.sum(normed * weighted, axis=1) / columns)[:, None]
        if MEAN is not None:
            dx -= (tl.sum(weighted, axis=1) / columns)[:, None]
        dx *= rstd
        if DSUMMED is not None:
            dx += tl.load(DSUMMED + at * stride_dsummed + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at * columns + column, dx.to(DX.dtype.element_ty), mask=inside)
        dweight += dy * normed
        dbias += dy
    at = program.to(tl.int64) * columns + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < columns
    if DWEIGHT is not None:
        tl.store(DWEIGHT + at, tl.sum(dweight, axis=0), mask=inside)
    if DBIAS is not None:
        tl.store(DBIAS + at, tl.sum(dbias, axis=0), mask=inside)


@triton.jit
def _column_sums(
    DY,
    X,
    MEAN,
    RSTD,
    rows,
    columns,
    DWEIGHT,
    DBIAS,
    chunk,
    stride_dy,
    stride_x,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same partial sums for rows that are too long to be held with them: a program takes a part of `chunk` rows."""
    program = tl.program_id(0)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, chunk, ROWS):
        row = program * chunk + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)
        at = row.to(tl.int64)[:, None]
        dy = tl.load(DY + at * stride_dy + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + at * stride_x + column, mask=inside, other=0.0).to(tl.float32)
        if MEAN is not None:
            x -= tl.load(MEAN + row, mask=row < rows, other=0.0)[:, None]
        dweight += dy * x * tl.load(RSTD + row, mask=row < rows, other=0.0)[:, None]
        dbias += dy
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = program.to(tl.int64) * columns + column
    tl.store(DWEIGHT + at, tl.sum(dweight, axis=0), mask=column < columns)
    if DBIAS is not None:
        tl.store(DBIAS + at, tl.sum(dbias, axis=0), mask=column < columns)


@triton.jit
def _add_partials(PARTIAL, OUT, programs, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (column < columns)[None, :]
        total += tl.load(PARTIAL + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(OUT + column, tl.sum(total, axis=0).to(OUT.dtype.element_ty), mask=column < columns)
