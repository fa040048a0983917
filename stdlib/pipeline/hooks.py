"""Hooks of parameters in a pipeline's step: they are called once, for the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def once_a_step(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Call hooks of gradients (`register_hook`, `register_post_accumulate_grad_hook`) behind what is run here, with all
    that it has added, and not for each microbatch: one that clips would clip other numbers."""
    waiting = []
    for parameter in parameters:
        dicts: list[Any] = [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
        if any(dicts):
            waiting.append((parameter, parameter.grad, [(each, dict(each)) for each in dicts]))
            parameter.grad = None
            for each in dicts:
                each.clear()
    done = False
    try:
        yield
        done = True
    finally:
        for parameter, before, hooks in waiting:
            for each, held in hooks:
                each.update(held)
            if not done:
                parameter.grad = before
    with torch.no_grad():
        for parameter, before, ((_, hooks_of_gradient), (_, hooks_behind)) in waiting:
            found = parameter.grad
            if found is not None:
                for hook in hooks_of_gradient.values():
                    changed = hook(found)
                    found = found if changed is None else changed
            if before is not None:
                parameter.grad = before
                if found is not None:
                    before.add_(found)
            else:
                parameter.grad = found
            if found is not None:
                for hook in hooks_behind.values():
                    hook(parameter)
