"""What a program returns: the plan's results, numbers of the call, and Python's objects."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.tape import Value
from monarch.language.programs.effects import Alias
from monarch.language.recorder.recording import Recording
from monarch.language.recorder.scalar import ScalarNode
from monarch.language.tensors.tensor import DistributedTensor


@dataclass(frozen=True)
class Result:
    """What a program gives back: a pytree whose leaves are the program's results (`Value`s), numbers of the call
    (`Expr`s), results that stand there again (`Alias`) and Python objects."""

    leaves: list[Any]
    spec: Any
    differentiable: list[bool] = field(default_factory=list)
    """For each of the `values` whether it would have a history in PyTorch."""

    @property
    def values(self) -> list[Value]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Value)]


def result_of(recording: Recording, returned: Any, keeps: Callable[[Any], bool]) -> Result:
    """What the program returns. A tensor or container that Python keeps elsewhere too is no result of the plan: each
    call returns the one that is there."""
    leaves, spec = pytree.tree_flatten(returned, is_leaf=lambda value: keeps(value) or _has_number_keys(value))
    found: list[Any] = []
    differentiable: list[bool] = []
    first: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, DistributedTensor) and first.setdefault(id(leaf), number) != number:
            found.append(Alias(first[id(leaf)]))
        elif isinstance(leaf, DistributedTensor):
            found.append(leaf if keeps(leaf) else recording.value_of(leaf._ref))
            if isinstance(found[-1], Value):
                differentiable.append(leaf.grad_fn is not None)
        elif isinstance(leaf, torch.SymFloat) and isinstance(leaf.node, ScalarNode):
            found.append(leaf.node.expr)
        elif isinstance(leaf, torch.SymInt):
            found.append(recording.symbols.size(leaf))
        elif isinstance(leaf, (torch.SymFloat, torch.SymBool)):
            found.append(float(leaf) if isinstance(leaf, torch.SymFloat) else bool(leaf))
        else:
            found.append(leaf)
    return Result(found, with_sizes(spec), differentiable)


class _Size:
    """Stands for torch.Size in the structure of arguments and results."""


def _flat(value: Any) -> tuple[list[Any], Any]:
    raise TypeError("it stands in structures only")


pytree.register_pytree_node(_Size, _flat, lambda sizes, _: torch.Size([*sizes]))


def with_sizes(spec: Any) -> Any:
    """A structure from which PyTorch builds each torch.Size as one: of its own it builds tuples."""
    if spec.is_leaf():
        return spec
    children = [with_sizes(child) for child in spec.children()]
    kind = _Size if spec.type is torch.Size else spec.type
    if kind is spec.type and all(map(operator.is_, children, spec.children())):
        return spec
    return pytree.TreeSpec(kind, spec._context, children)


def _has_number_keys(value: Any) -> bool:
    """Whether a dict has keys that stand for numbers of the call."""
    return isinstance(value, dict) and any(isinstance(key, torch.SymFloat) for key in value)
