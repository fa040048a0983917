"""Attention by its definition, in float64, and the cases that both directions are tested on."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Float64 out and lse of [batch, length, heads, dim], by the definition."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    own = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2])[None, :]
    if causal:
        scores = scores.masked_fill(key > own, -torch.inf)
    if window:
        scores = scores.masked_fill(key <= own - window, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(scores - lse[..., None].clamp_min(-1e300)))
    return (weights @ v).transpose(1, 2), lse


def attention_inputs(
    q_length: int, k_length: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype
) -> list[Tensor]:
    shapes = [(2, q_length, heads, dim), (2, k_length, key_heads, dim), (2, k_length, key_heads, dim)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window 1": {"causal": True, "window": 1},
    "window 20": {"causal": True, "window": 20},
    "window 64": {"causal": True, "window": 64},
}
LENGTHS = [(64, 64), (77, 77), (33, 90), (90, 33), (1, 50)]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()
