"""Attention in parts, by ops that every device has: the meaning of a plan's call of attention where no template takes
it.

A graph has attention as the op that ATen has for CPUs, whatever the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _multiplied(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product of halves in float32: an error of a rounded score is one of a factor of its exponential."""
    return left.float() @ right.float().transpose(-1, -2)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None) -> Any:
    scores = _multiplied(q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    return scores


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu`: [batch, heads, length, dim] of q's dtype, and the logsumexp
    of the scores, float32 [batch, heads, length]. Both are 0 for a query that sees no key."""
    _without(dropout)
    scores = _scores(q, k, causal, attn_mask, scale)
    total = scores.logsumexp(-1)
    total = total.masked_fill(total == -math.inf, 0.0)
    return (scores - total.unsqueeze(-1)).exp().to(v.dtype) @ v, total


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu_backward`: the gradients of q, k and v (Dao et al.,
    "FlashAttention", 2022, without its tiles)."""
    _without(dropout)
    weights = (_scores(q, k, causal, attn_mask, scale) - total.unsqueeze(-1)).exp()
    pulled = _multiplied(grad, v)
    own = (grad.float() * out.float()).sum(-1, keepdim=True)
    slopes = (weights * (pulled - own) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)).to(q.dtype)
    return slopes @ k, slopes.transpose(-1, -2) @ q, weights.to(v.dtype).transpose(-1, -2) @ grad


def _without(dropout: float) -> None:
    if dropout:
        raise NotImplementedError(f"attention with dropout {dropout} on a GPU")


IN_PARTS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
}
