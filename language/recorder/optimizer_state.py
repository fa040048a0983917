"""An optimizer's state and hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class OptimizerSnapshot:
    """An optimizer's state dicts and parameter groups as they are: to go back to after a failed trace."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
        self.counters = [
            (value, value.clone())
            for entries in optimizer.state.values()
            for value in entries.values()
            if type(value) is torch.Tensor and value.numel() == 1  # a step's number, plain, and counted in place
        ]
        self.groups = [dict(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        self.restore_state()
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=False):
            group.clear()
            group.update(before)

    def restore_state(self) -> None:
        """Give the optimizer the state that it had, and leave its hyperparameters as they are."""
        for parameter in list(self.optimizer.state):
            if parameter not in self.state:
                del self.optimizer.state[parameter]
        for parameter, entries in self.state.items():
            now = self.optimizer.state[parameter]
            now.clear()
            now.update(entries)
        for counter, value in self.counters:
            counter.copy_(value)


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer updates, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))
