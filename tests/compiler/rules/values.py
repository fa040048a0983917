"""Tensors for samples: the same in every run, with dims that several k divide and some that none does."""

from __future__ import annotations

import torch

_generator = torch.Generator().manual_seed(20)


def real(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=_generator, dtype=torch.float64).to(dtype)


def unit(*shape: int) -> torch.Tensor:
    """Numbers in (0.1, 0.9): in the domain of logarithms, inverse sines and the like."""
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def below(high: int, *shape: int) -> torch.Tensor:
    """Indices."""
    return torch.randint(0, high, shape, generator=_generator)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) > 0.5


def distinct(*shape: int) -> torch.Tensor:
    """Numbers no two of which are equal, so that a maximum has one place."""
    count = torch.Size(shape).numel()
    return torch.randperm(count, generator=_generator).to(torch.float64).view(shape)
