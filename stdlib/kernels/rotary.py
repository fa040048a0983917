"""Rotary position embedding of queries and keys (Su et al., "RoFormer", 2021).

Pair i of a head's elements is turned by the angle position / theta^(2 i / dim):

    first'  = first * cos - second * sin
    second' = second * cos + first * sin

A pair is (i, i + dim/2) as in Llama and GPT-NeoX, or (2 i, 2 i + 1), `interleaved`, as in GPT-J and the paper. The
gradient is the turn back: `inverse`. Computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant, ceil_div, check_alike, launch, next_power_of_2


def rotary_table(
    positions: int, dim: int, *, theta: float = 10000.0, device: torch.device | str | None = None
) -> Tensor:
    """Cosines and sines, float32 [2, positions, dim / 2], for `rotary` on `dim` elements of each head."""
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64, device=device), frequency)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotary(
    x: Tensor,
    table: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    out: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """x turned, or turned back; a new contiguous tensor, or `out`, which may be x itself.

    x: [batch, length, heads, dim] of any strides but 1 in the last dim; queries and keys in one tensor are just more
    heads. table: [2, positions, turned / 2] of `rotary_table`; elements from `turned` on pass unchanged. positions:
    integers [batch, length], or None for 0, 1, 2… in each sequence.
    """
    batch, length, heads, dim = x.shape
    _, known, half = table.shape
    if 2 * half > dim or x.stride(3) != 1 or not table.is_contiguous():
        raise MonarchError(
            f"x is {list(x.shape)} with strides {list(x.stride())}, and the table {list(table.shape)}",
            hint="The table turns up to dim elements, half of them each; heads and table are contiguous.",
        )
    if positions is None and length > known:
        raise MonarchError(f"sequences have {length} positions, and the table {known}")
    if positions is not None and positions.shape != (batch, length):
        raise MonarchError(f"positions are {list(positions.shape)}, and x has {batch} sequences of {length}")
    check_alike(x=x, out=out)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    variant = variant or variants(heads, dim)[0]
    launch(
        _rotate,
        (batch * length, ceil_div(heads, variant.tiles["HEADS"])),
        variant,
        X=x,
        COS=table[0],
        SIN=table[1],
        POSITIONS=positions,
        OUT=out,
        length=length,
        heads=heads,
        **{f"stride_x{i}": x.stride(i) for i in range(3)},
        **{f"stride_out{i}": out.stride(i) for i in range(3)},
        DIM=dim,
        HALF=half,
        PADDED=next_power_of_2(half),
        REST=next_power_of_2(dim - 2 * half) if dim > 2 * half else 0,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        IN_PLACE=out is x,
    )
    return out


def variants(heads: int, dim: int) -> tuple[Variant, ...]:
    """A program turns HEADS heads of a token."""
    padded = next_power_of_2(dim)
    most = next_power_of_2(heads)
    sizes = dict.fromkeys(
        (min(most, max(1, elements // padded)), warps) for elements, warps in [(4096, 4), (2048, 4), (1024, 2)]
    )
    return tuple(Variant({"HEADS": count}, warps, 1) for count, warps in sizes)


@triton.jit
def _rotate(
    X,
    COS,
    SIN,
    POSITIONS,
    OUT,
    length,
    heads,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_out0,
    stride_out1,
    stride_out2,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0)
    sequence, place = (token // length).to(tl.int64), (token % length).to(tl.int64)
    if POSITIONS is None:
        position = place
    else:
        position = tl.load(POSITIONS + token).to(tl.int64)
    pair = tl.arange(0, PADDED)
    cos = tl.load(COS + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(SIN + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    head = (tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS))[:, None]
    x = X + sequence * stride_x0 + place * stride_x1 + head * stride_x2
    out = OUT + sequence * stride_out0 + place * stride_out1 + head * stride_out2
    if INTERLEAVED:
        column = tl.arange(0, 2 * PADDED)[None, :]
        inside = (head < heads) & (column < 2 * HALF)
        both = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [HEADS, PADDED, 2]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(out + column, tl.reshape(turned, [HEADS, 2 * PADDED]).to(OUT.dtype.element_ty), mask=inside)
    else:
        column = pair[None, :]
        inside = (head < heads) & (column < HALF)
        first = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + column, (first * cos - second * sin).to(OUT.dtype.element_ty), mask=inside)
        tl.store(out + HALF + column, (second * cos + first * sin).to(OUT.dtype.element_ty), mask=inside)
    if REST > 0 and not IN_PLACE:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (column < DIM)
        tl.store(out + column, tl.load(x + column, mask=inside), mask=inside)
