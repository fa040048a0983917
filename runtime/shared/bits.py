"""A checksum that tensors of every kind have wherever they are: in a program, on a worker, on a GPU."""

from __future__ import annotations

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's elements, read as integers, modulo 2³²: i32[]. Those of 8 bytes count as two integers. Any
    bit that differs changes it, and so do several, but for one time in 2³²; the order of the elements does not."""
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    bits = x if x.dtype == torch.bool else x.view(_BITS[x.dtype.itemsize])
    total = bits.to(torch.int32).sum(dtype=torch.int32)
    if bits.dtype == torch.int64:
        total = total + (bits >> 32).to(torch.int32).sum(dtype=torch.int32)
    return total


class ArrivingSum:
    """The `bit_sum` of a value of 4-byte elements whose parts come one after the other; of one value after another."""

    def __init__(self) -> None:
        self._total = torch.zeros((), dtype=torch.int32)

    def begin(self) -> None:
        """A new value begins; the sum of the one before stays whose it is."""
        self._total = torch.zeros((), dtype=torch.int32)

    def add(self, part: torch.Tensor) -> None:
        """A part has arrived."""
        self._total += part.view(torch.int32).sum(dtype=torch.int32)

    def take(self) -> torch.Tensor:
        """The sum of those that have come: i32[]."""
        return self._total
