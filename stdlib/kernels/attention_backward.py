"""Attention that never stores its scores: backward (Dao, "FlashAttention-2", 2023). The forward is in attention.py.

    weights = exp(scores - lse)                          made again from q, k and the forward's lse
    dv = weightsᵀ @ dout;   dscores = weights * (dout @ vᵀ - delta);   delta = sum(out * dout) for each query
    dq = dscores @ k * scale;   dk = dscoresᵀ @ q * scale

One kernel holds a tile of keys and values and walks over the queries that see it, of all heads that share it; another
holds a tile of queries and walks over its keys. Scores are so computed twice, but nothing is added to memory by several
programs at once, and gradients are the same bits from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.stdlib.kernels.attention import (
    Packed,
    attention_problem,
    key_range,
    row_strides,
    sees,
    sequence_bounds,
    store_tile,
    strides,
    tile,
    tiled,
)
from monarch.stdlib.kernels.launch import Variant, ceil_div, check_alike, launch

ROWS = Variant({"M": 64}, 4, 1)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    packed: Packed | None = None,
    tf32: bool = False,
    key_variant: Variant | None = None,
    query_variant: Variant | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`, contiguous, like q, k and v; `out` and `lse` are the forward's results, all other arguments its
    own."""
    problem = attention_problem(q, k, v, causal=causal, window=window, scale=scale, packed=packed, tf32=tf32)
    check_alike(q=q, dout=dout, out=out)
    check_alike(lse_of_q=problem.rows(out), lse=lse)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    delta = torch.empty_like(lse)
    starts = {name: problem.arguments[name] for name in ("QUERY_STARTS", "query_length", "DIM", "D")}
    blocks = ceil_div(problem.query_length, ROWS.tiles["M"])
    launch(
        _products,
        (blocks, problem.heads, problem.sequences),
        ROWS,
        OUT=out,
        DOUT=dout,
        DELTA=delta,
        **starts,
        **strides(out=out, do=dout),
        **row_strides(delta),
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    read = {"Q": q, "K": k, "V": v, "DOUT": dout, "LSE": lse, "DELTA": delta}
    shared = {**read, **problem.arguments, **strides(q=q, k=k, v=v, do=dout), **row_strides(lse)}
    key_variant = key_variant or key_variants(problem.dim)[0]
    blocks = ceil_div(problem.key_length, key_variant.tiles["N"])
    grid = (blocks, problem.key_heads, problem.sequences)
    launch(_keys, grid, key_variant, DK=dk, DV=dv, **shared, **strides(dk=dk, dv=dv))
    query_variant = query_variant or query_variants(problem.dim)[0]
    blocks = ceil_div(problem.query_length, query_variant.tiles["M"])
    grid = (blocks, problem.heads, problem.sequences)
    launch(_queries, grid, query_variant, DQ=dq, **shared, **strides(dq=dq))
    return dq, dk, dv


def key_variants(dim: int) -> tuple[Variant, ...]:
    """Tiles of N keys that stay, by M queries. The first spills no registers on sm_90 (dim 256: 24 bytes)."""
    return tiled(dim, [(64, 128, 8, 2), (64, 64, 4, 2)], [(64, 64, 8, 2), (32, 128, 8, 2)], [(16, 64, 8, 2)])


def query_variants(dim: int) -> tuple[Variant, ...]:
    """Tiles of M queries that stay, by N keys. The first spills no registers on sm_90."""
    return tiled(dim, [(128, 64, 8, 2), (64, 64, 4, 2)], [(128, 64, 8, 2), (64, 64, 8, 2)], [(64, 32, 8, 2)])


@triton.jit
def _products(
    OUT, DOUT, DELTA, QUERY_STARTS, query_length,
    stride_outb, stride_outm, stride_outh,
    stride_dob, stride_dom, stride_doh,
    stride_rb, stride_rh,
    DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, query_length = sequence_bounds(QUERY_STARTS, sequence, query_length)
    if first >= query_length:
        return
    OUT += sequence * stride_outb + start * stride_outm + head * stride_outh
    DOUT += sequence * stride_dob + start * stride_dom + head * stride_doh
    out = tile(OUT, first, stride_outm, query_length, True, M, DIM, D).to(tl.float32)
    dout = tile(DOUT, first, stride_dom, query_length, True, M, DIM, D).to(tl.float32)
    row = first + tl.arange(0, M)
    at = DELTA + sequence * stride_rb + head * stride_rh + start + row
    tl.store(at, tl.sum(out * dout, axis=1), mask=row < query_length)


@triton.jit
def _keys(
    Q, K, V, DOUT, LSE, DELTA, DK, DV, QUERY_STARTS, KEY_STARTS, query_length, key_length, group, scale,
    stride_qb, stride_qm, stride_qh,
    stride_kb, stride_km, stride_kh,
    stride_vb, stride_vm, stride_vh,
    stride_dob, stride_dom, stride_doh,
    stride_dkb, stride_dkm, stride_dkh,
    stride_dvb, stride_dvm, stride_dvh,
    stride_rb, stride_rh,
    DIM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    first = tl.program_id(0) * N
    key_head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query_start, query_length = sequence_bounds(QUERY_STARTS, sequence, query_length)
    key_start, key_length = sequence_bounds(KEY_STARTS, sequence, key_length)
    if first >= key_length:
        return
    K += sequence * stride_kb + key_start * stride_km + key_head * stride_kh
    V += sequence * stride_vb + key_start * stride_vm + key_head * stride_vh
    Q += sequence * stride_qb + query_start * stride_qm + key_head * group * stride_qh
    DOUT += sequence * stride_dob + query_start * stride_dom + key_head * group * stride_doh
    LSE += sequence * stride_rb + query_start + key_head * group * stride_rh
    DELTA += sequence * stride_rb + query_start + key_head * group * stride_rh
    k = tile(K, first, stride_km, key_length, True, N, DIM, D)
    v = tile(V, first, stride_vm, key_length, True, N, DIM, D)
    low, low_full, high_full, high = _query_range(first, query_length, key_length, CAUSAL, WINDOW, M, N)
    dk = tl.zeros([N, D], dtype=tl.float32)
    dv = tl.zeros([N, D], dtype=tl.float32)
    if CAUSAL:
        dk, dv = _walk_queries(
            dk, dv, k, v, Q, DOUT, LSE, DELTA, stride_qm, stride_dom, stride_qh, stride_doh, stride_rh,
            group, low, low_full, first, query_length, key_length, scale * LOG2E,
            True, DIM, D, CAUSAL, WINDOW, PRECISION, M, N,
        )  # fmt: skip
    dk, dv = _walk_queries(
        dk, dv, k, v, Q, DOUT, LSE, DELTA, stride_qm, stride_dom, stride_qh, stride_doh, stride_rh,
        group, low_full, high_full, first, query_length, key_length, scale * LOG2E,
        False, DIM, D, CAUSAL, WINDOW, PRECISION, M, N,
    )  # fmt: skip
    if WINDOW > 0:
        dk, dv = _walk_queries(
            dk, dv, k, v, Q, DOUT, LSE, DELTA, stride_qm, stride_dom, stride_qh, stride_doh, stride_rh,
            group, high_full, high, first, query_length, key_length, scale * LOG2E,
            True, DIM, D, CAUSAL, WINDOW, PRECISION, M, N,
        )  # fmt: skip
    DK += sequence * stride_dkb + key_start * stride_dkm + key_head * stride_dkh
    DV += sequence * stride_dvb + key_start * stride_dvm + key_head * stride_dvh
    store_tile(DK, dk * scale, first, stride_dkm, key_length, N, DIM, D)
    store_tile(DV, dv, first, stride_dvm, key_length, N, DIM, D)


@triton.jit
def _query_range(
    first, query_length, key_length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Tiles of queries for the keys [first, first + N): any sees one in [low, high), all see all in [low_full,
    high_full).

    Tiles that reach beyond the last query need no mask: their lse is +inf there, and their weights 0.
    """
    low = 0
    low_full = 0
    high_full = query_length
    high = query_length
    if CAUSAL:
        own = first + query_length - key_length
        low = tl.minimum(tl.maximum(own, 0) // M * M, query_length)
        low_full = tl.minimum(tl.cdiv(tl.maximum(own + N - 1, 0), M) * M, query_length)
        if WINDOW > 0:
            high = tl.minimum(query_length, tl.maximum(own + N - 1 + WINDOW, 0))
            high_full = tl.minimum(tl.maximum(own + WINDOW, 0) // M * M, query_length)
            low_full = tl.minimum(low_full, tl.maximum(high, low))
        high_full = tl.maximum(high_full, low_full)
    return low, low_full, high_full, high


@triton.jit
def _walk_queries(
    dk, dv, k, v, Q, DOUT, LSE, DELTA, stride_q, stride_do, stride_qh, stride_doh, stride_rh, group, low, high, first,
    query_length, key_length, scale2, MASKED: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The summands of the queries from `low` to `high`, of all heads of the group, to the gradients of the keys and
    values.

    One loop over heads and tiles: two, one inside the other, would take more registers than there are.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    tiles = tl.cdiv(tl.maximum(high - low, 0), M)
    for index in range(group * tiles):
        member = tl.cast(index // tiles, tl.int64)
        start = low + index % tiles * M
        row = start + tl.arange(0, M)
        q = tile(Q + member * stride_qh, start, stride_q, query_length, True, M, DIM, D)
        lse = tl.load(LSE + member * stride_rh + row, mask=row < query_length, other=float("inf"))
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        weights = tl.exp2(scores * scale2 - (lse * LOG2E)[None, :])
        if MASKED:
            seen = sees(row + key_length - query_length, first + tl.arange(0, N), key_length, CAUSAL, WINDOW)
            weights = tl.where(tl.trans(seen), weights, 0.0)
        dout = tile(DOUT + member * stride_doh, start, stride_do, query_length, True, M, DIM, D)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = tl.load(DELTA + member * stride_rh + row, mask=row < query_length, other=0.0)
        dweights = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        dscores = weights * (dweights - delta[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _queries(
    Q, K, V, DOUT, LSE, DELTA, DQ, QUERY_STARTS, KEY_STARTS, query_length, key_length, group, scale,
    stride_qb, stride_qm, stride_qh,
    stride_kb, stride_km, stride_kh,
    stride_vb, stride_vm, stride_vh,
    stride_dob, stride_dom, stride_doh,
    stride_dqb, stride_dqm, stride_dqh,
    stride_rb, stride_rh,
    DIM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query_start, query_length = sequence_bounds(QUERY_STARTS, sequence, query_length)
    key_start, key_length = sequence_bounds(KEY_STARTS, sequence, key_length)
    if first >= query_length:
        return
    Q += sequence * stride_qb + query_start * stride_qm + head * stride_qh
    DOUT += sequence * stride_dob + query_start * stride_dom + head * stride_doh
    DQ += sequence * stride_dqb + query_start * stride_dqm + head * stride_dqh
    K += sequence * stride_kb + key_start * stride_km + head // group * stride_kh
    V += sequence * stride_vb + key_start * stride_vm + head // group * stride_vh
    row = first + tl.arange(0, M)
    at = sequence * stride_rb + head * stride_rh + query_start + row
    lse = tl.load(LSE + at, mask=row < query_length, other=float("inf")) * LOG2E
    delta = tl.load(DELTA + at, mask=row < query_length, other=0.0)
    q = tile(Q, first, stride_qm, query_length, True, M, DIM, D)
    dout = tile(DOUT, first, stride_dom, query_length, True, M, DIM, D)
    last = row + key_length - query_length
    low, low_full, high_full, high = key_range(first, query_length, key_length, CAUSAL, WINDOW, M, N)
    dq = tl.zeros([M, D], dtype=tl.float32)
    if WINDOW > 0:
        dq = _walk_keys(
            dq, q, dout, lse, delta, K, V, stride_km, stride_vm, low, low_full, last, key_length, scale * LOG2E, True,
            DIM, D, CAUSAL, WINDOW, PRECISION, N,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, dout, lse, delta, K, V, stride_km, stride_vm, low_full, high_full, last, key_length, scale * LOG2E,
        False, DIM, D, CAUSAL, WINDOW, PRECISION, N,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, dout, lse, delta, K, V, stride_km, stride_vm, high_full, high, last, key_length, scale * LOG2E, True,
        DIM, D, CAUSAL, WINDOW, PRECISION, N,
    )  # fmt: skip
    store_tile(DQ, dq * scale, first, stride_dqm, query_length, M, DIM, D)


@triton.jit
def _walk_keys(
    dq, q, dout, lse2, delta, K, V, stride_k, stride_v, low, high, last, key_length, scale2, MASKED: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The summands of the keys from `low` to `high` to the gradient of the queries."""
    for start in range(low, high, N):
        k = tile(K, start, stride_k, key_length, MASKED, N, DIM, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights = tl.exp2(scores * scale2 - lse2[:, None])
        if MASKED:
            weights = tl.where(sees(last, start + tl.arange(0, N), key_length, CAUSAL, WINDOW), weights, 0.0)
        v = tile(V, start, stride_v, key_length, MASKED, N, DIM, D)
        dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq
