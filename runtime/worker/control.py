"""Branches and loops of a plan: which of its functions run, and how often. Each worker decides that by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch.compiler.plan import Plan

Run = Callable[[list[Any]], Sequence[Any]]
"""Takes a function's inputs in order, and empties the list; gives its outputs in order."""

LOOK_SECONDS = 0.1
"""How often a loop looks whether other workers have failed."""


def cond(then: Run, otherwise: Run) -> Callable[..., Any]:
    """`cond` of `compiler.ops`."""

    def run(predicate: torch.Tensor, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return (then if predicate.item() else otherwise)([*operands])

    return run


def while_loop(condition: Run, body: Run, look: Callable[[], None]) -> Callable[..., Any]:
    """`while_loop` of `compiler.ops`."""

    def run(carried: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        values: Sequence[torch.Tensor] = carried
        number = 0
        until = time.monotonic() + LOOK_SECONDS
        while condition([*values, *operands, torch.tensor(number)])[0].item():
            values = body([*values, *operands, torch.tensor(number)])
            number += 1
            if (now := time.monotonic()) > until:
                look()
                until = now + LOOK_SECONDS
        return values if number else [value.clone() for value in values]

    return run


def scan(function: Plan, combine: Run, look: Callable[[], None], length: int, reverse: bool) -> Callable[..., Any]:
    """`scan` of `compiler.ops`; `function` is the plan that it runs in each round."""

    def run(
        carried: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        count = len(carried)
        types = [spec.type for spec in function.outputs[count:]]
        stacked = [torch.empty((length, *type_.local_shape(function.mesh)), dtype=type_.dtype) for type_ in types]
        values: Sequence[torch.Tensor] = [value.clone() for value in carried] if not length else carried
        until = time.monotonic() + LOOK_SECONDS
        for number in reversed(range(length)) if reverse else range(length):
            elements = [x[number].contiguous() for x in xs]
            made = combine([*values, *elements, *operands, torch.tensor(number)])
            values = made[:count]
            for target, element in zip(stacked, made[count:], strict=True):
                target[number] = element
            if (now := time.monotonic()) > until:
                look()
                until = now + LOOK_SECONDS
        return [*values, *stacked]

    return run
