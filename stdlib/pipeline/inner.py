"""Gradients that a model computes in its own forward pass: `torch.autograd.grad`, and transforms of `torch.func`.

The gradient of a tensor with rows is, row by row, one of those rows, as long as no call before it was made for the
whole batch. All others (of a parameter, or through such a call) have a term from each microbatch: all wait for one
another, and one call computes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from monarch.compiler.errors import ProgramError, Source
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The transform of `torch.func` that runs; None without."""


def several(entry: Any) -> tuple[Any, ...]:
    """The outputs or inputs of `torch.autograd.grad`, which takes one or several."""
    return (entry,) if isinstance(entry, torch.Tensor) else tuple(entry)


def within(tensor: Any) -> Any:
    """The tensor of the mesh within one that a transform has made."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def gradients_of_all(
    calls: Sequence[tuple[Any, Mapping[str, Any]]], has_rows: Callable[[Any], bool]
) -> list[tuple[Any, ...]]:
    """The gradients that each microbatch gets that calls `torch.autograd.grad` with these arguments: (outputs, inputs)
    and named ones. `has_rows` says whether a tensor of the first microbatch has rows of its own; others are one for
    all."""
    (first_outputs, first_inputs), options = calls[0]
    rows = {id(each): has_rows(each) for each in (*several(first_outputs), *several(first_inputs))}
    outputs: list[Any] = []
    weights: list[Any] = []
    inputs: dict[int, Any] = {}
    for at, ((given, of), named) in enumerate(calls):
        own, by = several(given), named.get("grad_outputs")
        by = (None,) * len(own) if by is None else several(by)
        for each, weight, first in zip(own, by, several(first_outputs), strict=True):
            if at == 0 or rows[id(first)]:
                outputs.append(each)
                weights.append(weight)
        inputs.update({id(each): each for each in several(of)})
    named = {**options, "grad_outputs": weights, "allow_unused": True}
    found: dict[int, Any] = dict(zip(inputs, torch.autograd.grad(outputs, [*inputs.values()], **named), strict=True))
    results: list[list[Any]] = [[] for _ in calls]
    for column in zip(*(several(of) for (_, of), _ in calls), strict=True):
        parts = [found[id(each)] for each in column]
        if not rows[id(column[0])]:
            terms = [found[at] for at in dict.fromkeys(map(id, column)) if found[at] is not None]  # in their order
            parts = [sum(terms[1:], terms[0]) if terms else None] * len(calls)
        if parts[0] is None and not options.get("allow_unused"):
            torch.autograd.grad(first_outputs, first_inputs, **options)  # raises PyTorch's error
        for result, part in zip(results, parts, strict=True):
            result.append(part)
    return [tuple(result) for result in results]


def one_by_one(call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The results of `torch.autograd.grad` with `is_grads_batched`, by a call for each gradient: for a single one the
    rules know whether it mixes rows. `call` makes a call with the arguments that follow."""
    by = kwargs.get("grad_outputs")
    given = () if by is None else several(by)
    sizes = {each.shape[0] if each.ndim else 0 for each in given if each is not None}
    if len(sizes) != 1 or 0 in sizes:
        return torch.autograd.grad(*args, **kwargs)  # raises PyTorch's error
    (count,) = sizes
    found = []
    for at in range(count):
        named = {**kwargs, "is_grads_batched": False}
        named["grad_outputs"] = [None if each is None else call(torch.select, each, 0, at) for each in given]
        if at < count - 1:
            named["retain_graph"] = True
        found.append(call(torch.autograd.grad, *args, **named))
    return tuple(None if column[0] is None else call(torch.stack, list(column)) for column in zip(*found, strict=True))


def check_inner(inputs: Any) -> ProgramError | None:
    """The error of a call of `torch.autograd.grad` whose rows have to be followed."""
    if all(isinstance(within(each), DistributedTensor) for each in several(inputs)):
        return None
    return ProgramError(
        "torch.autograd.grad of tensors of a transform in a pipeline's model",
        hint="whether it mixes the rows of the batch is unknown. Take the gradient outside of the transform;\n"
        "or say pipeline(…, mixes_rows=True), where each microbatch is mixed by itself.",
        source=user_source(),
    )


def in_transform(name: str, source: Source | None) -> ProgramError:
    """The error of a call on the whole batch within a transform of `torch.func`."""
    return ProgramError(
        f"{name} mixes the rows of a batch within a transform of torch.func",
        hint="all microbatches would wait for one another there, and none can leave a transform and resume it.\n"
        "torch.func.grad(f)(h)                                 # wrong, where f takes a sum over rows\n"
        "torch.autograd.grad(f(h), h, create_graph=True)[0]    # right\n"
        "torch.vmap(torch.func.grad(f))(h)                     # right, where f takes one row\n"
        "Or say pipeline(…, mixes_rows=True), where each microbatch is mixed by itself.",
        source=source,
    )
