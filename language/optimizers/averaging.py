"""`torch.optim.swa_utils.AveragedModel` on a mesh: it counts its updates there, and in a program it averages without a
branch on that count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from monarch.language.placing.distribute import distribute
from monarch.language.recorder.recording import current_program
from monarch.language.tensors.tensor import DistributedTensor

AveragedModel = swa_utils.AveragedModel


def _counted_on_the_mesh(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: AveragedModel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        placed = next((tensor for tensor in self.parameters() if isinstance(tensor, DistributedTensor)), None)
        if placed is not None and not isinstance(self.n_averaged, DistributedTensor):
            self.n_averaged = distribute(self.n_averaged, placed.mesh)

    return init


def _without_branches(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        in_program = current_program() is not None and isinstance(self.n_averaged, DistributedTensor)
        (_update if in_program else original)(self, model)

    return update_parameters


def _update(self: AveragedModel, model: nn.Module) -> None:
    """What `update_parameters` does, which copies the model the first time and averages later, by `torch.where`."""
    if self.use_buffers:
        ours = [*self.module.parameters(), *self.module.buffers()]
        theirs = [*model.parameters(), *model.buffers()]
    else:
        ours, theirs = [*self.parameters()], [*model.parameters()]
    averaged, now = [tensor.detach() for tensor in ours], [tensor.detach() for tensor in theirs]
    if self.multi_avg_fn is not None:
        new = [tensor.clone() for tensor in averaged]
        for dtype in dict.fromkeys(tensor.dtype for tensor in new):
            group = [number for number, tensor in enumerate(new) if tensor.dtype == dtype]
            self.multi_avg_fn([new[i] for i in group], [now[i] for i in group], self.n_averaged)
    else:
        average: Any = self.avg_fn or swa_utils.get_swa_avg_fn()
        new = [average(old, current, self.n_averaged) for old, current in zip(averaged, now, strict=True)]
    first = self.n_averaged == 0
    for old, current, later in zip(averaged, now, new, strict=True):
        old.copy_(torch.where(first, current.to(old.dtype), later.to(old.dtype)))
    if not self.use_buffers:
        for ours_, theirs_ in zip(self.module.buffers(), model.buffers(), strict=True):
            ours_.detach().copy_(theirs_.detach())
    self.n_averaged += 1


AveragedModel.__init__ = _counted_on_the_mesh(AveragedModel.__init__)  # type: ignore[method-assign]
AveragedModel.update_parameters = _without_branches(AveragedModel.update_parameters)  # type: ignore[method-assign]
