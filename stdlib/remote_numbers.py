"""Numbers of a remote function's call: operands of its op, so that one trace and one plan serve all values.

`propagate` gets stand-ins that say on which of them its results' shapes depend: a *watched* number notes when its value
is asked for, by a branch, as a size, by `int` or `math.sqrt`. Arithmetic on it does not ask, nor do ops of PyTorch's in
which it is an element's value. A number that was asked for stays in the op, which is another one for another value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch.compiler.tape import Op
from monarch.language import DistributedTensor
from monarch.language.recorder.dispatch import record
from monarch.language.recorder.recording import recording_for, source_now, turns
from monarch.language.recorder.scalar import ScalarNode, SymbolicNode
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import make_fake

aten = torch.ops.aten
_INT64 = range(-(2**63), 2**63)
_PRETENDED = 0.5
"""The stand-in of a number that only the workers know, where its value makes no difference."""


def kind_of(value: Any) -> type | None:
    """The type in which a worker gets a number, or None for an object that is no operand. A bool is none: it has two
    values, and decides a branch."""
    kind = type(value)
    if isinstance(value, torch.SymFloat):
        return float if isinstance(value.node, ScalarNode) else None
    if kind is float or kind is int and value in _INT64:
        return kind
    if isinstance(value, np.floating) and kind in (np.float16, np.float32, np.float64):
        return kind
    return kind if isinstance(value, np.integer) and int(value) in _INT64 else None


def operand(value: Any, kind: type, mesh: Mesh) -> DistributedTensor:
    """A number as an f64[] or i64[] of a mesh, which each call gives anew: outside of programs, and where a program
    has it as an argument."""
    whole = kind is int or issubclass(kind, np.integer)
    dtype = torch.int64 if whole else torch.float64
    if not isinstance(value, torch.SymFloat):
        value = int(value) if whole else float(value)
        with turns:
            recording = recording_for(mesh)
            if not recording.program:
                fake = make_fake((), dtype)
                result = recording.tape.value(fake)
                number = recording.lift(value, alone=True)
                recording.put(Op(aten.full.default, ((), number), (("dtype", dtype),), result, *source_now()))
                return recording.new(fake, result, ())
    return record(aten.full.default, ([], value), {"dtype": dtype}, mesh)


class Unknown(Exception):
    """`propagate` asked for a number that is not known."""


class _Node(SymbolicNode):
    """A watched number: its value, of which operands of the call it is made, and where it notes that it was asked."""

    __slots__ = ("asked", "hint", "known", "number", "of")

    def __init__(self, hint: Any, of: frozenset[int], asked: set[int], known: bool) -> None:
        self.hint, self.of, self.asked, self.known = hint, of, asked, known
        self.number = int if isinstance(hint, (int, np.integer)) else float

    def value(self) -> Any:
        self.asked |= self.of
        if not self.known:
            raise Unknown
        return self.hint

    def has_hint(self) -> bool:
        return False

    def maybe_as_int(self) -> int | None:
        return None

    def maybe_as_float(self) -> float | None:
        return None

    def guard_int(self, file: str, line: int) -> int:
        return int(self.value())

    def guard_float(self, file: str, line: int) -> float:
        return float(self.value())

    def __str__(self) -> str:
        return "number"


class _Watched:
    """The common part of watched ints and floats."""

    node: _Node

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` sees. PyTorch asks for the type first."""
        return type(self.node.hint)

    def __reduce_ex__(self, protocol: Any) -> Any:
        value: Any = self.node.value()
        return value.__reduce_ex__(protocol) if isinstance(value, np.generic) else (type(value), (value,))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.node.value(), dtype)


class _WatchedInt(_Watched, torch.SymInt):
    pass


class _WatchedFloat(_Watched, torch.SymFloat):
    pass


def _is_watched(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and isinstance(value.node, _Node)


def _wrapped(hint: Any, of: frozenset[int], asked: set[int], known: bool) -> Any:
    kind = _WatchedInt if isinstance(hint, (int, np.integer)) else _WatchedFloat
    return kind(_Node(hint, of, asked, known))


def example(value: Any) -> Any:
    """A number as one of Python's: any, where only the workers know it."""
    if not isinstance(value, torch.SymFloat):
        return value
    return _PRETENDED if value.node.hint is None else value.node.hint


def watched(value: Any, at: int, asked: set[int]) -> Any:
    """The stand-in for the number at place `at` of a call, which is put into `asked` when its value is asked for."""
    known = not isinstance(value, torch.SymFloat) or value.node.hint is not None
    return _wrapped(example(value), frozenset((at,)), asked, known)


def _computed(function: Callable[..., Any], reverse: bool) -> Callable[..., Any]:
    """Arithmetic gives watched numbers."""

    def method(self: Any, *others: Any) -> Any:
        nodes, hints = [self.node], [self.node.hint]
        for other in others:
            if _is_watched(other):
                nodes.append(other.node)
                hints.append(other.node.hint)
            elif isinstance(other, (int, float, np.number)):
                hints.append(other)
            else:
                return NotImplemented
        hint = function(*(reversed(hints) if reverse else hints))
        of: frozenset[int] = frozenset().union(*(node.of for node in nodes))
        if not isinstance(hint, (int, float, np.floating, np.integer)) or isinstance(hint, bool):
            for node in nodes:
                node.value()
            return hint
        return _wrapped(hint, of, self.node.asked, all(node.known for node in nodes))

    return method


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return function(self.node.value(), *(each.node.value() if _is_watched(each) else each for each in others))

    return method


def _install() -> None:
    for name in "add sub mul truediv floordiv mod pow".split():
        function = getattr(operator, name)
        for kind in (_WatchedInt, _WatchedFloat):
            setattr(kind, f"__{name}__", _computed(function, False))
            setattr(kind, f"__r{name}__", _computed(function, True))
    for kind in (_WatchedInt, _WatchedFloat):
        for name in "neg pos abs".split():
            setattr(kind, f"__{name}__", _computed(getattr(operator, name), False))
        for name in "eq ne lt le gt ge".split():
            setattr(kind, f"__{name}__", _asking(getattr(operator, name)))
        for name, function in (("int", int), ("float", float), ("bool", bool), ("hash", hash), ("repr", repr)):
            setattr(kind, f"__{name}__", _asking(function))
        for name, function in (("str", str), ("format", format), ("round", round), ("divmod", divmod)):
            setattr(kind, f"__{name}__", _asking(function))
    setattr(_WatchedInt, "__index__", _asking(operator.index))  # noqa: B010


_install()

_OF_SIZES = (aten.arange, aten.range)
"""Ops of PyTorch's whose results' shapes depend on numbers that are not declared as sizes."""


class Elements(TorchDispatchMode):
    """Watched numbers that are elements' values in an op of PyTorch's (`x * n`, `x.clamp(max=n)`) are not asked for:
    its result has the same shape and dtype for all."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        declared = func._schema.arguments
        named = {argument.name: argument for argument in declared}
        free = func.namespace == "aten" and func.overloadpacket not in _OF_SIZES
        found = [_plain(value, free and _is_element(declared[at])) for at, value in enumerate(args)]
        return func(
            *found, **{key: _plain(value, free and _is_element(named[key])) for key, value in (kwargs or {}).items()}
        )


def _is_element(argument: Any) -> bool:
    return str(argument.type) in ("number", "Optional[number]", "Tensor")  # which `x * n` declares; no size is a tensor


def _plain(value: Any, element: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(entry, element) for entry in value)
    if not _is_watched(value):
        return value
    return value.node.number(value.node.hint if element else value.node.value())
