"""A GPT (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019): pre-norm, learned positions.

The query, key and value projections are linear layers of their own: the output of one fused layer, cut into blocks over
a mesh dim, would hold the queries on some workers and the values on others, where attention needs whole heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from monarch.stdlib.models.cache import Cache


class Attention(nn.Module):
    """Causal self-attention over `heads` heads: (batch, time, width) to the same shape. `layer` is its number, by which
    a cache knows it. Raises ValueError where the heads do not divide the width."""

    def __init__(self, width: int, heads: int, layer: int = 0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide the width {width}")
        self.heads, self.layer = heads, layer
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: Cache | None = None) -> torch.Tensor:
        q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(attended.transpose(1, 2).flatten(2))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to (batch, heads, time, width / heads)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers, four times as wide between them: (..., width) to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream (batch, time, width)."""

    def __init__(self, width: int, heads: int, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, layer)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: Cache | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens i64[batch, time] to logits f32[batch, time, vocabulary]; time is at most `sequence`.

    The defaults are a byte-level model of 3.3 million parameters.
    """

    def __init__(
        self, *, vocabulary: int = 256, width: int = 256, layers: int = 4, heads: int = 4, sequence: int = 128
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(sequence, width))
        self.blocks = nn.ModuleList(Block(width, heads, layer) for layer in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: deviation 0.02, and less by the square root of their number where layers add to the
        residual stream, so that its variance does not grow with depth."""
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)
            elif name.endswith(("attention.o.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.blocks)) ** 0.5)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """`positions`, `mask` and `cache` are for generation (`monarch.stdlib.generation.Decodes`)."""
        place = self.positions[: tokens.shape[1]] if positions is None else F.embedding(positions, self.positions)
        x = self.embedding(tokens) + place
        for block in self.blocks:
            x = block(x, mask, cache)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(
        self, prompt: torch.Tensor, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """`count` more tokens after `prompt` i64[batch, time], drawn one at a time: i64[batch, time + count].

        For a model of plain tensors, which sees the last `sequence` tokens. Temperature 0 takes the likeliest.
        Raises ValueError for an empty prompt or a negative temperature.
        """
        if prompt.shape[1] == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if temperature < 0:
            raise ValueError(f"the temperature is {temperature}, and must not be negative")
        tokens = prompt
        for _ in range(count):
            logits = self(tokens[:, -self.sequence :])[:, -1]
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)
            tokens = torch.cat([tokens, token], 1)
        return tokens
