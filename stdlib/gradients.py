"""`grad_generator`: gradients one after the other. PyTorch Monarch's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor],
    with_respect_to: Sequence[torch.Tensor],
    grad_roots: Sequence[torch.Tensor | None] = (),
) -> Iterator[torch.Tensor | None]:
    """The gradients of the sum of `roots` with respect to each of the tensors, in their order; None for one that the
    roots do not depend on.

        for parameter, gradient in zip(parameters, grad_generator(loss, parameters)):
            parameter.data -= 0.1 * gradient

    `grad_roots` are the roots' own gradients, each of its root's shape; those that are left out are 1, for roots of one
    element. All gradients are computed when the first is asked for, as `torch.autograd.grad` does, and raises.
    """
    tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    given = [*grad_roots, *[None] * (len(tensors) - len(grad_roots))]
    yield from torch.autograd.grad(tensors, list(with_respect_to), given, allow_unused=True)
