"""The same code with a program and without it: all that a call gives and leaves, as plain data to compare."""

from __future__ import annotations

import collections
import enum
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from monarch.language import Mesh, Program, distribute, module_to_mesh, program

PLAIN = (int, float, str, bytes, complex, bool, type(None), torch.dtype, range, slice)
_MACHINERY = ("_ref", "_is_param", "_backward_hooks")
_OURS = ("monarch", "logging", "threading", "_thread", "torch.fx")


def world(mesh: Mesh | None) -> dict[str, Any]:
    """A layer "m" and its optimizer "o", what places modules and tensors, and what makes programs: on a mesh, or
    without one."""
    torch.manual_seed(0)
    place: Callable[[Any], Any] = lambda module: module if mesh is None else module_to_mesh(module, mesh, {})  # noqa: E731
    layer = place(nn.Linear(4, 4))
    return {
        "m": layer,
        "o": torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9),
        "place": place,
        "make": lambda tensor: tensor if mesh is None else distribute(tensor, mesh),
        "program": lambda function: function if mesh is None else program(function, mesh=mesh),
    }


def fit(w: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """One step of training in a world."""
    loss: torch.Tensor = w["m"](x).square().mean()
    loss.backward()
    w["o"].step()
    w["o"].zero_grad()
    return loss


def nothing(call: int) -> None:
    """No change behind a call."""


class Seen:
    """Plain data for all that can be reached from values. An object that is met again is its number: the same objects
    are at the same places."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return type(value).__name__, str(value)
        if isinstance(value, PLAIN):
            return type(value).__name__, value
        if isinstance(value, Program):
            return self(value.__wrapped__)
        if id(value) in self.numbers:
            return "object", self.numbers[id(value)]
        self.numbers[id(value)] = len(self.numbers)
        self.kept.append(value)
        return self.new(value)

    def new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            own = {key: entry for key, entry in vars(value).items() if key not in _MACHINERY}
            grad = None if not value.is_leaf or value.grad is None else self(value.grad)
            return whole.detach(), value.is_leaf and value.requires_grad, grad, self.entries(own)
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, dict):
            kept = {key: entry for key, entry in value.items() if key not in ("place", "make", "program")}
            if isinstance(value, collections.OrderedDict):  # hooks, by numbers that PyTorch counts up
                return list(map(self, kept.values()))
            return type(value).__name__, self.entries(kept)
        if isinstance(value, (list, tuple, collections.deque)):
            return type(value).__name__, list(map(self, value))
        if isinstance(value, (set, frozenset)):
            return type(value).__name__, sorted(map(repr, map(self, value)))
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.MethodType):
            return self(value.__self__), self(value.__func__)
        if isinstance(value, type):
            names = [name for name in vars(value) if not name.startswith("_") and not callable(vars(value)[name])]
            return value.__name__, [(name, self(vars(value)[name])) for name in names]
        if isinstance(value, (types.ModuleType, RemovableHandle)) or type(value).__module__.startswith(_OURS):
            return type(value).__name__
        slots = [n for kind in type(value).__mro__ for n in vars(kind).get("__slots__", ()) if hasattr(value, n)]
        own = {
            **{name: getattr(value, name) for name in slots if name != "__weakref__"},
            **getattr(value, "__dict__", {}),
        }
        return type(value).__name__, self.entries(own)

    def entries(self, found: dict[Any, Any]) -> list[Any]:
        return [(self(key), self(entry)) for key, entry in found.items()]

    def function(self, value: Any) -> Any:
        if value.__module__ and value.__module__.startswith(("torch", "monarch")):
            return value.__qualname__
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self(cell.cell_contents))
            except ValueError:
                cells.append("unset")
        return value.__name__, cells, self(value.__defaults__), self(value.__kwdefaults__), self(value.__dict__)


def difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """Where plain data differs, and how."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        same = same and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
        return None if same else f"{path}: {ours} for {theirs}"
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((found for i, (a, b) in pairs if (found := difference(a, b, f"{path}[{i}]"))), None)
    if isinstance(ours, float) and isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-9) or ours != ours and theirs != theirs
        return None if same else f"{path}: {ours} for {theirs}"
    return None if type(ours) is type(theirs) and ours == theirs else f"{path}: {ours} for {theirs}"


def assert_alike(case: Callable[..., Any], mesh: Mesh, calls: int = 6) -> None:
    """Call a case's step with and without a program, and change the world behind each call: what is given and left is
    the same. `case` takes a world, and gives a step, what changes the world behind call number i, and, if it likes,
    what makes the argument of that call. A `step` that calls programs of its own says so by an attribute `own`."""
    (theirs, change_theirs, *made), (ours, change_ours, *_) = case(world(None)), case(world(mesh))
    traced = ours if hasattr(ours, "own") else program(ours, mesh=mesh)
    batch = lambda call: torch.randn(3, 4, generator=torch.Generator().manual_seed(call))  # noqa: E731
    make = made[0] if made else batch
    for call in range(calls):
        expected = theirs(make(call))
        found = traced(pytree.tree_map_only(torch.Tensor, lambda tensor: distribute(tensor, mesh), make(call)))
        one, other = Seen(), Seen()
        told = difference([*map(one, (found, ours, change_ours))], [*map(other, (expected, theirs, change_theirs))])
        assert told is None, f"call {call} of {case.__name__}: {told}"
        for change in (change_theirs, change_ours):
            torch.manual_seed(call)
            change(call)
