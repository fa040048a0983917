"""The common part of ops with regions: the gradients through them, and the tensors that they take, carry and give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from monarch.compiler.errors import ProgramError
from monarch.compiler.tape import Value
from monarch.compiler.types import TensorType
from monarch.language.recorder.recording import Recording, current_program
from monarch.language.recorder.regions import (
    Reads,
    TracedRegion,
    snapshot,
)
from monarch.language.recorder.varying import placed
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor


class Differentiable:
    """An op with regions whose gradients may be asked for: `sources` are the tensors of the program that it has
    gradients for."""

    def __init__(self, outer: Recording, traced: Sequence[TracedRegion]) -> None:
        self.outer = outer
        self.traced = traced
        self.held: dict[int, Value] = {}
        """The values of storages that the regions read, when the op ran."""

    @cached_property
    def read(self) -> dict[int, torch.Tensor]:
        """The tensors outside that the regions read, and that require gradients, by their keys."""
        return {
            key: source
            for each in self.traced
            for key, (source, stand_in) in each.region.stand_ins.items()
            if stand_in.requires_grad
        }

    @property
    def sources(self) -> list[torch.Tensor]:
        return list(self.read.values())

    def forward(self) -> list[DistributedTensor]:
        """Record the op."""
        raise NotImplementedError

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Record its backward op; gives the gradients of `sources`."""
        raise NotImplementedError

    def run(self) -> list[torch.Tensor]:
        differentiated = any(result.requires_grad for each in self.traced for result in each.results)
        if not (torch.is_grad_enabled() and differentiated and any(each.requires_grad for each in self.sources)):
            return [*self.forward()]
        return [*_Differentiate.apply(self, *self.sources)]

    def hold(self, storages: Reads) -> None:
        """Keep what storages hold now for the backward pass."""
        for cell, ref in storages.items():
            self.held[cell] = snapshot(self.outer, self.outer.value_of(ref))

    def values(self, storages: Reads) -> tuple[Value, ...]:
        """The values of storages when the op ran."""
        return tuple(
            self.held[cell] if cell in self.held else self.outer.value_of(ref) for cell, ref in storages.items()
        )

    def gradients(
        self, traced: TracedRegion, given: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """In a region, the gradients of these inputs of it for those `given` of its results: zeros for None."""
        pairs = [
            (result, gradient)
            for result, gradient in zip(traced.results, given, strict=True)
            if result.requires_grad and gradient is not None
        ]
        wanted = [each for each in inputs if each is not None]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            results, of_results = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, wanted, of_results, allow_unused=True, retain_graph=True)
        return [zeros_of(x) if made is None else made for x, made in zip(wanted, found, strict=True)]


class _Differentiate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Differentiable, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.op = op
        made = tuple(op.forward())
        ctx.mark_non_differentiable(*(each for each in made if not is_smooth(each)))
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op: Differentiable = ctx.op
        if current_program() is not op.outer:
            raise ProgramError(
                "a gradient goes through a branch or a loop that another program, or another region, has run",
                hint="ask for the gradient where the branch or the loop is.",
                source=user_source(),
            )
        return (None, *op.backward(gradients))


def zeros_of(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tuple(like.shape), dtype=like.dtype)


def is_smooth(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def tensor_of(recording: Recording, value: Any, what: str) -> DistributedTensor:
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value)
    if isinstance(value, torch.Tensor):
        taken = recording.taken(value)
        return taken if isinstance(taken, DistributedTensor) else placed(recording, taken)
    raise ProgramError(
        f"{what} has {value!r:.60}, a {type(value).__name__}, and has to be tensors",
        hint="leave it out: the functions can read it from outside.",
        source=user_source(),
    )


def values_of(recording: Recording, tensors: Sequence[torch.Tensor]) -> list[Value]:
    found = []
    for each in tensors:
        own = each if isinstance(each, DistributedTensor) else recording.constant(each)
        found.append(recording.value_of(own._ref))
    return found


def carried_differ(
    what: str, spec: Any, types: list[TensorType], traced: TracedRegion, count: int | None = None
) -> ProgramError:
    made = traced.types[:count]
    shape = "" if made != types else "\nThe lists, tuples and dicts that hold them differ."
    return ProgramError(
        f"{what} returns values whose types differ from its arguments",
        hint=f"its arguments are {shown(types)}, and its results {shown(made)}{shape}"
        "\nCarried values keep their shapes, dtypes and structure: cast them, or begin with such values.",
        source=user_source(),
    )


def shown(types: Sequence[TensorType]) -> str:
    return f"({', '.join(map(str, types))})"
