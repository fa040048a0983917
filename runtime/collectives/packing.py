"""Tensors of several shapes and dtypes, to be moved as one row of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGN = 16  # bytes: any dtype may begin there


class Packing:
    """Tensors of some shapes and dtypes, one after the other in a row of `size` bytes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._like = like
        self._device = like[0].device
        self._starts = []
        self.size = 0
        for tensor in like:
            self._starts.append(self.size)
            self.size += -(-tensor.nbytes // _ALIGN) * _ALIGN

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [
            row[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.nbytes
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=row.device)
            for start, tensor in zip(self._starts, self._like, strict=True)
        ]

    def packed(self, rows: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Several such lists, one behind the other."""
        packed = torch.empty(len(rows) * self.size, dtype=torch.uint8, device=self._device)
        for at, tensors in enumerate(rows):
            for view, tensor in zip(self.views(packed[at * self.size : (at + 1) * self.size]), tensors, strict=True):
                view.copy_(tensor)
        return packed
