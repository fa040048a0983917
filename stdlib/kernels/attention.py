"""Attention that never stores its scores: forward. The backward is in attention_backward.py.

    scores = q @ kᵀ * scale, where query sees key;   out = softmax(scores) @ v;   lse = log(sum(exp(scores)))

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023. A program holds a tile of
queries and walks over the tiles of keys that any of them sees; only tiles at the edge of what is seen are masked.

Queries are [batch, length, heads, dim], keys and values [batch, length, key heads, dim], of any strides but 1 in the
last dim (so heads may as well come before length: pass `x.transpose(1, 2)`). Several heads of queries may share one of
keys and values (Ainslie et al., "GQA", 2023): head h reads key head h // (heads / key heads). Sequences of different
lengths lie one behind the other, [tokens, heads, dim], and `Packed` says where each begins.

`causal`: the last query sees all keys, the one before it all but the last, and so on, also where there are more keys
than queries (a cache). With `window` each sees only that many keys, up to its own. A query that sees no key gives 0,
and -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant, ceil_div, launch, next_power_of_2


@dataclass(frozen=True)
class Packed:
    """The first tokens of sequences that are packed one behind the other: int32 [sequences + 1], the last entry the
    number of tokens.

    The longest lengths are numbers, for they decide how many programs run; larger than need be is right but slow.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Problem:
    """The shapes of one attention, checked, with the arguments that all its kernels share."""

    sequences: int
    query_length: int
    key_length: int
    heads: int
    key_heads: int
    dim: int
    arguments: dict[str, Any]

    def rows(self, out: Tensor) -> Tensor:
        """A float32 number for each query and head, [batch, heads, length] or [heads, tokens]."""
        shape = (*out.shape[:-3], out.shape[-2], out.shape[-3])
        return torch.empty(shape, dtype=torch.float32, device=out.device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    packed: Packed | None = None,
    tf32: bool = False,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)`: out like q but contiguous; lse float32 [batch, heads, length], or [heads, tokens] where packed.

    `scale` is 1 / sqrt(dim) unless given; `tf32` lets float32 tensors be multiplied as tf32. Dims up to 256.
    """
    problem = attention_problem(q, k, v, causal=causal, window=window, scale=scale, packed=packed, tf32=tf32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = problem.rows(out)
    variant = variant or variants(problem.dim)[0]
    launch(
        _forward,
        (ceil_div(problem.query_length, variant.tiles["M"]), problem.heads, problem.sequences),
        variant,
        Q=q,
        K=k,
        V=v,
        OUT=out,
        LSE=lse,
        **problem.arguments,
        **strides(q=q, k=k, v=v, out=out),
        **row_strides(lse),
    )
    return out, lse


def attention_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
    packed: Packed | None,
    tf32: bool,
) -> Problem:
    """Raises MonarchError for shapes that do not fit each other."""
    dims = 4 if packed is None else 3
    shapes = f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
    if q.dim() != dims or k.dim() != dims or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        layout = "[batch, length, heads, dim]" if packed is None else "[tokens, heads, dim] where packed"
        raise MonarchError(f"{shapes}, which do not fit each other", hint=f"They are {layout}, k and v alike.")
    if packed is None and q.shape[0] != k.shape[0]:
        raise MonarchError(f"{shapes}, which have different batches")
    heads, dim = q.shape[-2:]
    key_heads = k.shape[-2]
    if heads % key_heads:
        raise MonarchError(f"{heads} heads of queries cannot share {key_heads} heads of keys evenly")
    if dim > 256 or any(x.stride(-1) != 1 for x in (q, k, v)):
        raise MonarchError(f"{shapes}; heads have at most 256 elements, which are contiguous")
    if window is not None and (not causal or window < 1):
        raise MonarchError(f"a window of {window} keys, up to the query's own, needs causal=True and at least 1 key")
    if packed is None:
        sequences, query_length, key_length = q.shape[0], q.shape[1], k.shape[1]
    else:
        sequences = packed.query_starts.shape[0] - 1
        query_length, key_length = packed.longest_query, packed.longest_key
    arguments = {
        "QUERY_STARTS": packed.query_starts if packed else None,
        "KEY_STARTS": packed.key_starts if packed else None,
        "query_length": query_length,
        "key_length": key_length,
        "group": heads // key_heads,
        "scale": float(dim**-0.5 if scale is None else scale),
        "DIM": dim,
        "D": max(16, next_power_of_2(dim)),
        "CAUSAL": causal,
        "WINDOW": window or 0,
        "PRECISION": "tf32" if tf32 else "ieee",
    }
    return Problem(sequences, query_length, key_length, heads, key_heads, dim, arguments)


def strides(**tensors: Tensor) -> dict[str, int]:
    """For each tensor x: stride_xb over the batch (0 where packed), stride_xm over the length, stride_xh over heads."""
    found: dict[str, int] = {}
    for name, x in tensors.items():
        *batch, length, heads, _ = x.stride()
        found |= {f"stride_{name}b": sum(batch), f"stride_{name}m": length, f"stride_{name}h": heads}
    return found


def row_strides(lse: Tensor) -> dict[str, int]:
    """The strides of `lse`, which is [batch, heads, length] or packed [heads, tokens], as the kernels' arguments."""
    *batch, heads, _ = lse.stride()
    return {"stride_rb": sum(batch), "stride_rh": heads}


def variants(dim: int) -> tuple[Variant, ...]:
    """Tiles of M queries by N keys. The first spills no registers on sm_80 and sm_90 (dim 64: 24 bytes on sm_80)."""
    return tiled(
        dim,
        [(128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3)],
        [(128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)],
        [(64, 32, 8, 2), (128, 32, 8, 2)],
    )


def tiled(dim: int, *by_dim: list[tuple[int, int, int, int]]) -> tuple[Variant, ...]:
    """Variants as (M, N, warps, stages): of dims up to 64, up to 128, and larger ones."""
    sizes = by_dim[0 if dim <= 64 else 1 if dim <= 128 else 2]
    return tuple(Variant({"M": m, "N": n}, warps, stages) for m, n, warps, stages in sizes)


@triton.jit
def _forward(
    Q, K, V, OUT, LSE, QUERY_STARTS, KEY_STARTS, query_length, key_length, group, scale,
    stride_qb, stride_qm, stride_qh,
    stride_kb, stride_km, stride_kh,
    stride_vb, stride_vm, stride_vh,
    stride_outb, stride_outm, stride_outh,
    stride_rb, stride_rh,
    DIM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    LN2: tl.constexpr = 0.6931471805599453
    # Causal tiles at the end take the longest, and so begin first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query_start, query_length = sequence_bounds(QUERY_STARTS, sequence, query_length)
    key_start, key_length = sequence_bounds(KEY_STARTS, sequence, key_length)
    if first >= query_length:
        return
    Q += sequence * stride_qb + query_start * stride_qm + head * stride_qh
    K += sequence * stride_kb + key_start * stride_km + head // group * stride_kh
    V += sequence * stride_vb + key_start * stride_vm + head // group * stride_vh
    OUT += sequence * stride_outb + query_start * stride_outm + head * stride_outh
    LSE += sequence * stride_rb + head * stride_rh + query_start
    scale2 = scale / LN2
    q = tile(Q, first, stride_qm, query_length, True, M, DIM, D)
    # The key that a query of this number sees last.
    last = first + tl.arange(0, M) + key_length - query_length
    low, low_full, high_full, high = key_range(first, query_length, key_length, CAUSAL, WINDOW, M, N)
    acc = tl.zeros([M, D], dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    maximum = tl.full([M], float("-inf"), tl.float32)
    if WINDOW > 0:
        acc, total, maximum = _attend(
            acc, total, maximum, q, K, V, stride_km, stride_vm, low, low_full, last, key_length, scale2, True, DIM, D,
            CAUSAL, WINDOW, PRECISION, N,
        )  # fmt: skip
    acc, total, maximum = _attend(
        acc, total, maximum, q, K, V, stride_km, stride_vm, low_full, high_full, last, key_length, scale2, False, DIM,
        D, CAUSAL, WINDOW, PRECISION, N,
    )  # fmt: skip
    acc, total, maximum = _attend(
        acc, total, maximum, q, K, V, stride_km, stride_vm, high_full, high, last, key_length, scale2, True, DIM, D,
        CAUSAL, WINDOW, PRECISION, N,
    )  # fmt: skip
    lse = (maximum + tl.log2(total)) * LN2
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    row = first + tl.arange(0, M)
    tl.store(LSE + row, lse, mask=row < query_length)
    store_tile(OUT, acc, first, stride_outm, query_length, M, DIM, D)


@triton.jit
def _attend(
    acc, total, maximum, q, K, V, stride_k, stride_v, low, high, last, key_length, scale2, MASKED: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The running sums after the keys from `low` to `high`."""
    for start in range(low, high, N):
        k = tile(K, start, stride_k, key_length, MASKED, N, DIM, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            scores = tl.where(sees(last, start + tl.arange(0, N), key_length, CAUSAL, WINDOW), scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1) * scale2)
        shift = higher
        if MASKED:
            # A query that has seen no key yet: -inf - -inf would be no number.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale2 - shift[:, None])
        shrink = tl.exp2(maximum - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tile(V, start, stride_v, key_length, MASKED, N, DIM, D)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        maximum = higher
    return acc, total, maximum


@triton.jit
def sequence_bounds(STARTS, sequence, length):
    """Where the sequence begins in the batch's tokens, and its length."""
    start = tl.zeros([], dtype=tl.int64)
    if STARTS is not None:
        begin = tl.load(STARTS + sequence)
        length = tl.load(STARTS + sequence + 1) - begin
        start = begin.to(tl.int64)
    return start, length


@triton.jit
def key_range(
    first, query_length, key_length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Tiles of keys for the queries [first, first + M): any key is seen in [low, high), all are in [low_full,
    high_full)."""
    low = 0
    high = key_length
    low_full = 0
    high_full = key_length
    if CAUSAL:
        own = first + key_length - query_length
        high = tl.maximum(tl.minimum(key_length, own + M), 0)
        high_full = tl.minimum(key_length, own + 1)
        if WINDOW > 0:
            low = tl.maximum(own + 1 - WINDOW, 0) // N * N
            low_full = tl.minimum(tl.cdiv(tl.maximum(own + M - WINDOW, 0), N) * N, tl.maximum(high, low))
    high_full = tl.maximum(tl.maximum(high_full, 0) // N * N, low_full)
    return low, low_full, high_full, high


@triton.jit
def sees(last, key, key_length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which key each query sees, [queries, keys], where `last` is the last one that it may."""
    seen = (key < key_length)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= last[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > last[:, None] - WINDOW)
    return seen


@triton.jit
def tile(X, start, stride, length, MASKED: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] from row `start` on; 0 past the head's elements, and where MASKED past the sequence's end."""
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    # The large part of the offset is one number in 64 bits; the offsets inside of a tile fit in 32.
    x = X + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if MASKED and DIM < D:
        return tl.load(x, mask=(start + row < length)[:, None] & (column < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(x, mask=(start + row < length)[:, None], other=0.0)
    elif DIM < D:
        return tl.load(x, mask=(column < DIM)[None, :], other=0.0)
    else:
        return tl.load(x)


@triton.jit
def store_tile(X, values, start, stride, length, ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    x = X + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (start + row < length)[:, None] & (column < DIM)[None, :]
    tl.store(x, values.to(X.dtype.element_ty), mask=inside)
