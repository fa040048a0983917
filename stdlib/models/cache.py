"""A cache of keys and values, of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class Cache:
    """The keys and values of all layers: of each (batch, heads, length, width). A model's attention calls `update`.

    `place` is where the next token's go; None while the prompts run, which fill the first places.
    """

    length: int
    place: torch.Tensor | None = None
    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new keys and values (batch, heads, new, width) of a layer, and give what its queries may look at."""
        if self.place is None:
            more = (0, 0, 0, self.length - keys.shape[2])
            assert layer == len(self.layers), "layers come in order"
            self.layers.append((F.pad(keys, more), F.pad(values, more)))
            return keys, values
        here = (torch.arange(self.length) == self.place)[:, None]
        old_keys, old_values = self.layers[layer]
        self.layers[layer] = torch.where(here, keys, old_keys), torch.where(here, values, old_values)
        return self.layers[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        """Questions of `transformers`' models, without use where they get positions and a mask."""
        return 0

    is_compileable = True
