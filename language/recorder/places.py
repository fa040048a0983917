"""`x[i]` where only the workers know the number `i`: views at a *place* that is a tensor without dims.

PyTorch asks such a tensor for its number, and makes a view of it. Here the view's op gets a `torch.SymInt` that stands
for the number, so that autograd, views of the view and writes through it are PyTorch's own. On the tape it is an `Expr`
of the value that the tensor has at that time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from monarch.compiler.tape import Expr, Value, View
from monarch.language.errors import branch_error
from monarch.language.recorder.scalar import SymbolicNode
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor, Ref


class Recording(Protocol):
    """A recording, as far as places know it."""

    def value_of(self, ref: Ref) -> Value: ...


class PlaceNode(SymbolicNode):
    """The node of a SymInt: the tensor that has the number, and what shape functions take for it."""

    __slots__ = ("hint", "tensor")
    number = int

    def __init__(self, tensor: DistributedTensor, hint: int) -> None:
        self.tensor = tensor
        self.hint = hint

    def expr(self, recording: Recording) -> Expr:
        return Expr("item", (recording.value_of(self.tensor._ref),))

    def has_hint(self) -> bool:
        return False

    def maybe_as_int(self) -> int | None:
        return None

    def guard_int(self, file: str, line: int) -> int:
        raise branch_error(user_source())

    def __str__(self) -> str:
        return "place"


def place_of(arguments: Any) -> DistributedTensor | None:
    """The tensor that has the number of a place among the arguments of a view's op."""
    nodes = (each.node for each in arguments if isinstance(each, torch.SymInt))
    return next((node.tensor for node in nodes if isinstance(node, PlaceNode)), None)


def view_on(recording: Recording, view: View, place: DistributedTensor | None) -> View:
    """A view that was recorded on another tape, at the place that `place` says."""
    if place is None:
        return view
    at = Expr("item", (recording.value_of(place._ref),))
    return replace(view, args=tuple(at if isinstance(entry, Expr) else entry for entry in view.args))
