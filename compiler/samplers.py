"""Distributions without a closed form for a number of draws: each element takes uniform numbers until one is accepted.

An element's numbers follow from its own place and parameters alone: how many an element needs changes no other one.
All is reckoned in f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Uniform = Callable[[], torch.Tensor]
"""Uniform numbers, 0 < u < 1, of the parameters' shape: others at each call."""

_MOST = 1000
"""Rounds. Of a parameter that is in range each accepts more than half of the numbers; others end here, with nan."""


def _normal(uniform: Uniform) -> torch.Tensor:
    """Box and Muller (1958)."""
    return torch.sqrt(-2 * torch.log(uniform())) * torch.cos(2 * math.pi * uniform())


def _until_accepted(like: torch.Tensor, propose: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The first proposal of each element that is accepted."""
    found = torch.full_like(like, math.nan)
    for _ in range(_MOST):
        value, accepted = propose()
        found = torch.where(accepted & found.isnan(), value, found)
        if not found.isnan().any():
            break
    return found


def gamma(shape: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """Of scale 1: Marsaglia and Tsang, A Simple Method for Generating Gamma Variables (2000)."""
    boost = torch.where(shape < 1, uniform() ** (1 / shape), 1.0)
    d = torch.where(shape < 1, shape + 1, shape) - 1 / 3
    c = 1 / torch.sqrt(9 * d)

    def propose() -> tuple[torch.Tensor, torch.Tensor]:
        x = _normal(uniform)
        v = (1 + c * x) ** 3
        return d * v, (v > 0) & (torch.log(uniform()) < 0.5 * x * x + d - d * v + d * torch.log(v))

    return torch.where(shape <= 0, 0.0, _until_accepted(shape, propose) * boost)


def poisson(rate: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """By its sums below a rate of 10; above by Hörmann, The Transformed Rejection Method for Generating Poisson Random
    Variables (1993)."""
    small = rate < 10
    low = torch.where(small, rate, 1.0)
    rare = _by_sums(torch.exp(-low), lambda k: low / (k + 1), uniform())
    high = torch.where(small, 10.0, rate)
    b = 0.931 + 2.53 * torch.sqrt(high)
    a = -0.059 + 0.02483 * b
    inverse = 1.1239 + 1.1328 / (b - 3.4)
    sure = 0.9277 - 3.6224 / (b - 2)

    def propose() -> tuple[torch.Tensor, torch.Tensor]:
        u, v = uniform() - 0.5, uniform()
        us = 0.5 - u.abs()
        k = torch.floor((2 * a / us + b) * u + high + 0.43)
        exact = torch.log(v * inverse / (a / (us * us) + b)) <= k * torch.log(high) - high - torch.lgamma(k + 1)
        return k, (k >= 0) & (((us >= 0.07) & (v <= sure)) | (((us >= 0.013) | (v <= us)) & exact))

    return torch.where(small, rare, _until_accepted(rate, propose))


def binomial(count: torch.Tensor, probability: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """By its sums below a mean of 10; above by Hörmann, The Generation of Binomial Random Variates (1993)."""
    count, probability = count.clamp(min=0), probability.clamp(0, 1)
    flipped = probability > 0.5
    p = torch.where(flipped, 1 - probability, probability)
    small = count * p < 10
    n, few = torch.where(small, 40.0, count), torch.where(small, count, 0.0)
    p, rarely = torch.where(small, 0.5, p), torch.where(small, p, 0.0)
    odds = rarely / (1 - rarely)
    rare = _by_sums((1 - rarely) ** few, lambda k: (few - k) / (k + 1) * odds, uniform())
    deviation = torch.sqrt(n * p * (1 - p))
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * p
    alpha = (2.83 + 5.1 / b) * deviation
    sure = 0.92 - 4.2 / b
    mode = torch.floor((n + 1) * p)
    height = torch.lgamma(mode + 1) + torch.lgamma(n - mode + 1)

    def propose() -> tuple[torch.Tensor, torch.Tensor]:
        u, v = uniform() - 0.5, uniform()
        us = 0.5 - u.abs()
        k = torch.floor((2 * a / us + b) * u + n * p + 0.5)
        inside = (k >= 0) & (k <= n)
        at = torch.where(inside, k, mode)
        ratio = height - torch.lgamma(at + 1) - torch.lgamma(n - at + 1) + (at - mode) * torch.log(p / (1 - p))
        exact = torch.log(v * alpha / (a / (us * us) + b)) <= ratio
        return k, inside & (((us >= 0.07) & (v <= sure)) | exact)

    found = torch.where(small, rare, _until_accepted(count, propose))
    return torch.where(flipped, count - found, found)


def _by_sums(first: torch.Tensor, ratio: Callable[[int], torch.Tensor], u: torch.Tensor) -> torch.Tensor:
    """The first k for which the probabilities up to k are more than u: that of 0 is `first`, that of k + 1 `ratio(k)`
    times that of k."""
    found, here, below = torch.zeros_like(u), first, first
    for k in range(_MOST):
        higher = u >= below
        if not higher.any():
            break
        found = found + higher
        here = here * ratio(k)
        below = below + here
    return torch.where(first.isnan(), math.nan, found)


SAMPLERS: dict[str, Callable[..., torch.Tensor]] = {"gamma": gamma, "poisson": poisson, "binomial": binomial}
"""By name: a function of the parameters, which all have one shape, and of what gives uniform numbers."""
