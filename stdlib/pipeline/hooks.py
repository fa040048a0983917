"""Hooks of parameters in a pipeline's step: they are called once, for the gradients of the whole batch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Hooks = OrderedDict[int, Callable[..., Any]]


@contextmanager
def once_a_step(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Call hooks of gradients (`register_hook`, `register_post_accumulate_grad_hook`) behind the block's ops, with all
    gradients that these have added, and not for each microbatch: one that clips would clip other numbers."""
    waiting: list[tuple[nn.Parameter, torch.Tensor | None, Hooks, Hooks]] = []
    cleared: list[Hooks] = []
    hooks: list[Hooks] = []
    put_back = map(OrderedDict.update, cleared, hooks)
    try:
        try:
            for parameter in parameters:
                both: list[Any] = [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
                if any(both):
                    of_gradient, behind = (OrderedDict(each or {}) for each in both)
                    waiting.append((parameter, parameter.grad, of_gradient, behind))
                    parameter.grad = None
                    for each, held in zip(both, (of_gradient, behind), strict=True):
                        if each:
                            cleared.append(each)
                            hooks.append(held)
                            each.clear()
            yield
        finally:
            deque(put_back, 0)  # one call without Python's code in it: Ctrl-C comes before it or behind
        with torch.no_grad():
            for each_waiting in waiting:
                _call(*each_waiting)
    except BaseException:
        for parameter, before, _, _ in waiting:
            parameter.grad = before
        raise


def _call(parameter: nn.Parameter, before: torch.Tensor | None, of_gradient: Hooks, behind: Hooks) -> None:
    """Call a parameter's hooks for the part of its gradient added since `before`."""
    found = parameter.grad
    if found is not None:
        for hook in of_gradient.values():
            changed = hook(found)
            found = found if changed is None else changed
    if before is not None:
        parameter.grad = before
        if found is not None:
            before.add_(found)
    else:
        parameter.grad = found
    if found is not None:
        for hook in behind.values():
            hook(parameter)
