"""What a program returns: the plan's results, numbers of the call, and Python's objects."""

from __future__ import annotations

import collections
import itertools
import operator
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.tape import Value
from monarch.language.programs.classify import kind_of
from monarch.language.programs.effects import Alias, Effects
from monarch.language.programs.kinds import Tensor
from monarch.language.recorder.recording import Recording
from monarch.language.recorder.scalar import ScalarNode
from monarch.language.recorder.scalar_int import NUMBERS, ScalarInt
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.tensor import DistributedTensor


@dataclass(frozen=True)
class Result:
    """What a program gives back: a pytree whose leaves are the program's results (`Value`s), numbers of the call
    (`Expr`s), results that stand there again (`Alias`) and Python objects."""

    leaves: list[Any]
    spec: Any
    differentiable: list[bool] = field(default_factory=list)
    """For each of the `values` whether it would have a history in PyTorch."""
    strides: list[tuple[int, ...] | None] = field(default_factory=list)
    """Likewise its strides, of those that are not contiguous."""

    @property
    def values(self) -> list[Value]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Value)]


@dataclass(frozen=True)
class Stopped:
    """The program has raised StopIteration."""

    error: StopIteration


def result_of(
    recording: Recording,
    returned: Any,
    effects: Effects,
    known: Container[int],
    made_here: Callable[[CodeType], bool],
) -> Result:
    """What the program returns. A tensor or container that Python keeps elsewhere too is no result of the plan: each
    call returns the one that is there; `known` are the ids of the objects that were there before. Raises ProgramError
    for a generator or coroutine that it has made: whose code is `made_here`, or that has its tensors."""
    several = _in_several_places(recording, returned, effects, known)

    def keeps(value: Any) -> bool:
        return id(value) in several or effects.keeps(value)

    leaves, spec = pytree.tree_flatten(returned, is_leaf=lambda value: keeps(value) or _has_number_keys(value))
    found: list[Any] = []
    differentiable: list[bool] = []
    strides: list[tuple[int, ...] | None] = []
    first: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, DistributedTensor) and first.setdefault(id(leaf), number) != number:
            found.append(Alias(first[id(leaf)]))
        elif isinstance(leaf, DistributedTensor):
            found.append(leaf if keeps(leaf) else recording.value_of(leaf._ref))
            if isinstance(found[-1], Value):
                differentiable.append(leaf.grad_fn is not None)
                strides.append(_strides(leaf))
        elif isinstance(leaf, torch.SymFloat) and isinstance(leaf.node, ScalarNode):
            found.append(leaf.node.expr)
        elif isinstance(leaf, ScalarInt):
            found.append(leaf.expr)
        elif isinstance(leaf, torch.SymInt):
            found.append(recording.symbols.size(leaf))
        elif isinstance(leaf, (torch.SymFloat, torch.SymBool)):
            found.append(float(leaf) if isinstance(leaf, torch.SymFloat) else bool(leaf))
        else:
            if isinstance(leaf, (GeneratorType, CoroutineType, AsyncGeneratorType)):
                _check_ran(recording, leaf, made_here)
            found.append(leaf)
    return Result(found, with_sizes(spec), differentiable, strides)


def _in_several_places(recording: Recording, returned: Any, effects: Effects, known: Container[int]) -> set[int]:
    """The ids of the containers that stand in several places of what a program returns, or in an object there. Has
    `effects` keep the tensors in these, each of which is one object in all places, results that share memory, and
    leaves that require a gradient."""
    met: set[int] = set()
    rest: list[Any] = []

    def is_leaf(value: Any) -> bool:
        if isinstance(value, (list, dict, collections.deque)):
            if id(value) in met:
                rest.append(value)
            met.add(id(value))
        return effects.keeps(value) or _has_number_keys(value)

    leaves = pytree.tree_leaves(returned, is_leaf=is_leaf)
    rest += [leaf for leaf in leaves if not isinstance(leaf, DistributedTensor) or leaf.requires_grad and leaf.is_leaf]
    effects.cells.update({id(cell): cell for cell in _shared_memory(recording, leaves)})
    seen: set[int] = set()
    containers: set[int] = set()
    while rest:
        value = rest.pop()
        kind = kind_of(value)
        if kind is None or isinstance(kind, str) or id(value) in seen or id(value) in known:
            continue
        seen.add(id(value))
        if isinstance(value, DistributedTensor):
            cell = value._ref.cell
            if cell.recording is recording and id(cell) not in recording.input_cells:
                effects.cells[id(cell)] = cell
        elif not issubclass(kind, Tensor):
            if id(value) in met:
                containers.add(id(value))
            rest += [entry for part in kind.read(value) for entry in part]
    return containers


def _shared_memory(recording: Recording, leaves: list[Any]) -> Iterator[Cell]:
    """What the program has made of which several results are views with entries in common (`y, y.detach()`): a change
    of one in place is seen in the others."""
    views: dict[int, dict[int, DistributedTensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, DistributedTensor) and leaf._ref.cell.recording is recording:
            views.setdefault(id(leaf._ref.cell), {})[id(leaf)] = leaf
    for several in views.values():
        cell = next(iter(several.values()))._ref.cell
        if len(several) > 1 and id(cell) not in recording.input_cells:
            spans = sorted(_span(tensor._ref.fake) for tensor in several.values())
            if any(last > first for (_, last), (first, _) in itertools.pairwise(spans)):
                yield cell


def _span(view: torch.Tensor) -> tuple[int, int]:
    """The first of its memory's entries that a view has, and the one behind the last; of named sizes all."""
    first, strides = view.storage_offset(), [*zip(view.shape, view.stride(), strict=True)]
    if any(type(each) is not int for each in (first, *itertools.chain.from_iterable(strides))):
        return 0, sys.maxsize
    return int(first), int(first) + (1 + sum((size - 1) * stride for size, stride in strides) if view.numel() else 0)


def _check_ran(recording: Recording, leaf: Any, made_here: Callable[[CodeType], bool]) -> None:
    """Raise for code of the program that would run behind it."""
    kind, asynchronous = type(leaf).__name__.replace("_", " "), not isinstance(leaf, GeneratorType)
    prefix = {GeneratorType: "gi", CoroutineType: "cr"}.get(type(leaf), "ag")
    code: CodeType = getattr(leaf, f"{prefix}_code")
    frame: FrameType | None = getattr(leaf, f"{prefix}_frame")
    has = [] if frame is None else [value for value in frame.f_locals.values() if isinstance(value, DistributedTensor)]
    if made_here(code) or any(value._ref.cell.recording is recording for value in has):
        raise ProgramError(
            f"the program returns {'an' if kind[0] == 'a' else 'a'} {kind}, whose code would run when the program has "
            "returned",
            hint="have a plain function be the program, and call it from the coroutine: return step(x)."
            if asynchronous
            else "return a list of its values: return [*rows(x)], or have a plain function be the program.",
            source=Source(code.co_filename, code.co_firstlineno),
        )


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


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is not contiguous, and has no named sizes."""
    strides = tensor.stride()
    named = any(isinstance(number, torch.SymInt) for number in (*strides, *tensor.shape))
    return None if named or tensor.is_contiguous() else strides


def _has_number_keys(value: Any) -> bool:
    """Whether a dict has keys that stand for numbers of the call."""
    return isinstance(value, dict) and any(isinstance(key, NUMBERS) for key in value)
