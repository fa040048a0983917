"""A Llama-like decoder (Touvron et al., "LLaMA", 2023): RMS norms, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from monarch.stdlib.models.cache import Cache


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate (batch, heads, time, width) by angles that grow with the positions i64[batch or 1, time]: feature i and
    feature i + width / 2 are a pair (Su et al., "RoFormer", 2021)."""
    half = x.shape[-1] // 2
    speed = base ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = (positions[:, None, :, None] * speed).to(torch.float32)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) to the same shape. Each of `groups` heads of keys and values serves
    `heads / groups` heads of queries (Ainslie et al., "GQA", 2023). Raises ValueError where one does not divide the
    other."""

    def __init__(self, width: int, heads: int, groups: int, base: float, layer: int) -> None:
        super().__init__()
        if width % heads or heads % groups:
            raise ValueError(f"{groups} groups do not divide {heads} heads, or these the width {width}")
        self.heads, self.groups, self.base, self.layer = heads, groups, base, layer
        size = width // heads
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k = nn.Linear(width, groups * size, bias=False)
        self.v = nn.Linear(width, groups * size, bias=False)
        self.o = nn.Linear(heads * size, width, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        q = rotated(self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2), positions, self.base)
        k = rotated(self.k(x).unflatten(2, (self.groups, -1)).transpose(1, 2), positions, self.base)
        v = self.v(x).unflatten(2, (self.groups, -1)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        k, v = (each[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A gated MLP (Shazeer, "GLU Variants Improve Transformer", 2020): (..., width) to the same shape."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and `mlp`, each behind a norm and added to the residual stream (batch, time, width)."""

    def __init__(self, attention: Attention, mlp: nn.Module, width: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=eps)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width, eps=eps)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens i64[batch, time] to logits f32[batch, time, vocabulary], for any time.

    `groups` heads have keys and values, by default all; `inner` is the MLP's width, by default 8/3 of `width`.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        groups: int | None = None,
        inner: int | None = None,
        base: float = 10_000.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(
                Attention(width, heads, groups or heads, base, layer),
                self.mlp(width, inner or 8 * width // 3),
                width,
                eps,
            )
            for layer in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=eps)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def mlp(self, width: int, inner: int) -> nn.Module:
        """The MLP of one block."""
        return SwiGLU(width, inner)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """`positions`, `mask` and `cache` are for generation (`monarch.stdlib.generation.Decodes`)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, mask, cache)
        return self.head(self.norm(x))
