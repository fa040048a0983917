"""A vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Self-attention over `heads` heads, each patch to all: (batch, patches, width) to the same shape. Raises
    ValueError where the heads do not divide the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide the width {width}")
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream (batch, patches, width)."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, eps=eps)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ViT(nn.Module):
    """Images f32[batch, channels, size, size] to logits f32[batch, classes]. `patch` divides `size`, or
    ValueError is raised."""

    def __init__(
        self,
        *,
        classes: int = 10,
        size: int = 32,
        patch: int = 4,
        channels: int = 3,
        width: int = 192,
        layers: int = 4,
        heads: int = 4,
        inner: int | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"patches of {patch} do not divide images of {size}")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.first = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, inner or 4 * width, eps) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=eps)
        self.head = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Positions normal, of deviation 0.02, and the first token zero."""
        nn.init.zeros_(self.first)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
