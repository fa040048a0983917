"""Sequence parallelism beside tensor parallelism: activations between blocks are shards of the sequence.

Column and row layers split the work within attention and MLPs, and what lies between, norms and residual sums, each
worker would compute whole. Here a worker has its block of the sequence there: a row layer's sum goes to the workers by
a reduce_scatter, and a column layer gathers its input, which is as many bytes as the all_reduce of both (Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from monarch.compiler.types import Layout
from monarch.language import DistributedTensor, layout


@dataclass(frozen=True)
class Between:
    """The layout of activations [batch, time, width] between blocks, in which `dim` shards time."""

    dim: str
    layout: Layout

    @property
    def within(self) -> Layout:
        """The layout of column layers' inputs and row layers' outputs: the same, with time whole on `dim`."""
        shards = (tuple(name for name in names if name != self.dim) for names in self.layout.shards)
        return Layout(tuple(shards))

    def suits(self, x: Any) -> bool:
        """Whether `x` is a tensor of three dims on a mesh with these dims, whose workers divide its sizes."""
        if not isinstance(x, DistributedTensor) or x.ndim != 3:
            return False
        if not set(self.layout.mesh_dims) <= x.mesh.spec.sizes.keys():
            return False
        return not any(
            size % x.mesh.size(names) for size, names in zip(x.shape, self.layout.shards, strict=True) if names
        )


def shard_between(module: nn.Module, between: Between | None, columns: Iterable[str], rows: Iterable[str]) -> None:
    """Lay out the inputs and outputs of the layers of these names in `module`; None removes such layouts again."""
    for layer in module.modules():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for number in [number for number, hook in hooks.items() if isinstance(hook, (_Takes, _Gives))]:
                del hooks[number]
    if between is None:
        return
    for name in dict.fromkeys(columns):
        module.get_submodule(name).register_forward_pre_hook(_Takes(between))
    for name in dict.fromkeys(rows):
        module.get_submodule(name).register_forward_hook(_Gives(between))


@dataclass(frozen=True)
class _Takes:
    """A column layer gathers blocks of time. Several may take the same value, whose gradients are added before they are
    scattered, so these are left as they come."""

    between: Between

    def __call__(self, layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if not given or not self.between.suits(given[0]):
            return given
        return _LaidOut.apply(given[0], (self.between.layout, self.between.within), ()), *given[1:]


@dataclass(frozen=True)
class _Gives:
    """A row layer gives blocks of time, and gathers the gradient of these."""

    between: Between

    def __call__(self, layer: nn.Module, given: tuple[Any, ...], made: Any) -> Any:
        if not self.between.suits(made):
            return made
        return _LaidOut.apply(made, (self.between.layout,), (self.between.layout, self.between.within))


class _LaidOut(torch.autograd.Function):
    """The identity, by way of some layouts of the value, and of some of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: Sequence[Layout], gradient: Sequence[Layout]) -> torch.Tensor:
        ctx.gradient = gradient
        return reduce(layout, value, x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return reduce(layout, ctx.gradient, gradient), None, None
