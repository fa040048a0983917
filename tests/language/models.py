"""Small models, and what compares a distributed training run with plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from monarch.language import Mesh, module_to_mesh


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Token and position embeddings, blocks, tied output weights."""

    def __init__(self, vocabulary: int = 32, width: int = 16, heads: int = 2, layers: int = 2, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU()
        )
        self.classify = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


Step = Callable[..., Any]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., torch.Tensor]) -> Step:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def twins(make: Callable[[], nn.Module], mesh: Mesh, **layouts: Any) -> tuple[nn.Module, nn.Module]:
    """The same model twice: on the mesh, and plain."""
    torch.manual_seed(0)
    plain = make()
    return module_to_mesh(copy.deepcopy(plain), mesh, **layouts), plain


def token_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def square_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def token_batch(seed: int, batch: int = 4, length: int = 8, vocabulary: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, vocabulary, (2, batch, length), generator=generator)
    return tokens, targets


def vector_batch(seed: int, batch: int = 4, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)


def assert_same_parameters(on_mesh: nn.Module, plain: nn.Module, atol: float = 2e-6) -> None:
    for (name, ours), (_, theirs) in zip(on_mesh.state_dict().items(), plain.state_dict().items(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
