"""Computations that PyTorch's own Python code makes by reading a tensor's value, without reading it: on a mesh the
value is on the workers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Wishart, von_mises

from monarch.language.tensors.tensor import DistributedTensor


def _averaging(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
        count = self.num_batches_tracked
        averages = self.momentum is None and self.training and self.track_running_stats
        if not averages or not isinstance(count, DistributedTensor):
            return forward(self, input)
        self._check_input_dim(input)
        count.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        result = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            part = count.double().reciprocal()
            for average, new in ((self.running_mean, mean), (self.running_var, var)):
                average.copy_(new * part + average * (1 - part))
        return result

    return batch_norm


_ROUNDS = 32
"""A round accepts two of three proposals at least: of 1e15 numbers one is in none of these."""


def _first_accepted(sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(sample)
    def rejection_sample(
        loc: torch.Tensor, concentration: torch.Tensor, proposal_r: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(loc, DistributedTensor):
            return sample(loc, concentration, proposal_r, x)
        u1, u2, u3 = torch.rand_like(loc.expand(3, _ROUNDS, *x.shape)).unbind()
        z = torch.cos(math.pi * u1)
        f = (1 + proposal_r * z) / (proposal_r + z)
        c = concentration * (proposal_r - f)
        accepted = ((c * (2 - c) - u2) > 0) | ((c / u2).log() + 1 - c >= 0)
        first = accepted.to(torch.int64).argmax(0, keepdim=True)
        angle = ((u3 - 0.5).sign() * f.acos()).gather(0, first).squeeze(0)
        return (angle + math.pi + loc) % (2 * math.pi) - math.pi

    return rejection_sample


def _regular(rsample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(rsample)
    def sample(self: Any, sample_shape: Sequence[int] = (), max_try_correction: int | None = None) -> torch.Tensor:
        shape = torch.Size(sample_shape)
        if not isinstance(self._unbroadcasted_scale_tril, DistributedTensor):
            return rsample(self, shape, max_try_correction)
        found: torch.Tensor = self._bartlett_sampling(shape)
        for _ in range(_TRIES if max_try_correction is None else max_try_correction):
            found = torch.where(self.support.check(found)[..., None, None], found, self._bartlett_sampling(shape))
        return found

    return sample


_TRIES = 3
"""As in PyTorch where it traces: a singular matrix is rare."""


def _by_quantiles(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """By the normal distribution's inverse, where PyTorch draws numbers outside again: but for bounds that few numbers
    of the normal distribution are between, which it computes too roughly."""

    @functools.wraps(fill)
    def truncated(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
        if not isinstance(tensor, DistributedTensor) or generator is not None or high - low <= 0.6:
            return fill(tensor, mean, std, a, b, generator=generator)
        with torch.no_grad():
            drawn = torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            drawn = drawn.uniform_(low, high).erfinv() * (std * math.sqrt(2)) + mean
            return tensor.copy_(drawn.clamp(a, b))

    return truncated


nn.init._no_grad_trunc_normal_ = _by_quantiles(nn.init._no_grad_trunc_normal_)
nn.modules.batchnorm._BatchNorm.forward = _averaging(nn.modules.batchnorm._BatchNorm.forward)  # type: ignore[method-assign]
von_mises._rejection_sample = _first_accepted(von_mises._rejection_sample)
Wishart.rsample = _regular(Wishart.rsample)  # type: ignore[method-assign]
