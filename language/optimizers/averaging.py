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
        meshes = {id(each.mesh) for each in self.parameters() if isinstance(each, DistributedTensor)}
        ours = isinstance(self.n_averaged, DistributedTensor) and (current_program() is not None or len(meshes) > 1)
        (_update if ours else original)(self, model)

    return update_parameters


def _update(self: AveragedModel, model: nn.Module) -> None:
    """The function of `update_parameters`, which copies the model the first time and averages later, by `torch.where`;
    on each mesh where the model is."""
    if self.use_buffers:
        ours = [*self.module.parameters(), *self.module.buffers()]
        theirs = [*model.parameters(), *model.buffers()]
    else:
        ours, theirs = [*self.parameters()], [*model.parameters()]
    averaged, now = [tensor.detach() for tensor in ours], [tensor.detach() for tensor in theirs]
    counted: Any = self.n_averaged
    homes = [tensor.mesh if isinstance(tensor, DistributedTensor) else counted.mesh for tensor in ours]
    counts: dict[Any, Any] = {mesh: counted.to(mesh) for mesh in homes}
    if self.multi_avg_fn is not None:
        new = [tensor.clone() for tensor in averaged]
        groups: dict[Any, list[int]] = {}
        for number, (tensor, mesh) in enumerate(zip(new, homes, strict=True)):
            groups.setdefault((mesh, tensor.dtype), []).append(number)
        for (mesh, _), group in groups.items():
            self.multi_avg_fn([new[i] for i in group], [now[i] for i in group], counts[mesh])
    else:
        average: Any = self.avg_fn or swa_utils.get_swa_avg_fn()
        rows = zip(averaged, now, homes, strict=True)
        new = [average(old, current, counts[mesh]) for old, current, mesh in rows]
    first = {mesh: count == 0 for mesh, count in counts.items()}
    for old, current, later, mesh in zip(averaged, now, new, homes, strict=True):
        old.copy_(torch.where(first[mesh], current.to(old.dtype), later.to(old.dtype)))
    if not self.use_buffers:
        for ours_, theirs_ in zip(self.module.buffers(), model.buffers(), strict=True):
            ours_.detach().copy_(theirs_.detach())
    self.n_averaged += 1


AveragedModel.__init__ = _counted_on_the_mesh(AveragedModel.__init__)  # type: ignore[method-assign]
AveragedModel.update_parameters = _without_branches(AveragedModel.update_parameters)  # type: ignore[method-assign]
