"""One call of an op, as rules and localizers read it: arguments by name, tensor operands in order, shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx

from monarch.compiler.alike import frozen
from monarch.compiler.names import find_op
from monarch.compiler.ops import MonarchOp, out_of_place
from monarch.compiler.rules.line import Shape
from monarch.compiler.types import TensorType

ShapeOf = Callable[[fx.Node], Any]
"""The shape of a node's tensor, or a tuple of its tensors' shapes: local where a mesh dim has been done already."""


def op_name(target: Any) -> str:
    """`aten.mm.default` for an ATen overload, `all_reduce` for an op of ours."""
    if isinstance(target, (torch._ops.OpOverload, MonarchOp)):
        return str(target)
    return getattr(target, "__name__", str(target))


def called_op(node: fx.Node) -> Any:
    """The op that a node calls, also out of place."""
    return find_op(str(node.args[0])) if node.target is out_of_place else node.target


@dataclass(frozen=True)
class Signature:
    """An op's parameters: names, default values, and which of them are single tensors, or tensors or numbers."""

    names: tuple[str, ...]
    defaults: dict[str, Any]
    tensors: tuple[str, ...]
    values: tuple[str, ...]
    has_lists: bool

    @cached_property
    def at(self) -> dict[str, int]:
        """Each parameter's position."""
        return {name: index for index, name in enumerate(self.names)}


_TENSORS = ("Tensor", "Optional[Tensor]")
_NUMBERS = ("number", "Optional[number]")


@cache
def signature_of(target: Any) -> Signature | None:
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        kinds = {argument.name: str(argument.type) for argument in arguments}
        return Signature(
            tuple(argument.name for argument in arguments),
            {argument.name: argument.default_value for argument in arguments if argument.has_default_value()},
            tuple(name for name, kind in kinds.items() if kind in _TENSORS),
            tuple(name for name, kind in kinds.items() if kind in (*_TENSORS, *_NUMBERS)),
            any("Tensor" in kind and "List" in kind for kind in kinds.values()),
        )
    if isinstance(target, MonarchOp):
        return Signature(tuple(re.findall(r"\w+", target.signature)), {}, (), (), False)
    return None


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument by its schema name, its schema default, or `default` where the overload has no such argument."""
    signature = signature_of(node.target)
    if signature is not None and name in signature.at:
        at = signature.at[name]
        if at < len(node.args):
            return node.args[at]
        if name in node.kwargs:
            return node.kwargs[name]
        return signature.defaults.get(name, default)
    return default


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a call in order: positional arguments first, then keyword arguments, lists flattened.

    A node that stands twice among the arguments stands twice here.
    """
    found: list[fx.Node] = []
    _collect(node.args, found)
    if node.kwargs:
        _collect(node.kwargs.values(), found)
    return found


def _collect(values: Iterable[Any], found: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("type"), TensorType):
                found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def replace_operands(value: Any, replacements: Sequence[Any]) -> Any:
    """`value` (arguments, nested) with its tensor operands, in `tensor_operands`' order, replaced one by one."""
    return _replace(value, iter(replacements))


def _replace(value: Any, replacements: Any) -> Any:
    if isinstance(value, fx.Node):
        return next(replacements) if isinstance(value.meta.get("type"), TensorType) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, replacements) for item in value)
    if isinstance(value, dict):
        return {key: _replace(item, replacements) for key, item in value.items()}
    return value


def result_types(node: fx.Node) -> list[TensorType | None]:
    """A call's result types in order; None for an output that is not made."""
    types = node.meta["type"]
    if isinstance(types, TensorType):
        return [types]
    return [] if types is None else list(types)


class Call:
    """A call of an op. `call["dim"]` is an argument by its schema name, or its default.

    `operands`   the tensor operands in order (see `tensor_operands`)
    `shapes`     their shapes
    `results`    the shapes of the results in order; None for an output that is not made; () for a call without results
    """

    def __init__(
        self,
        node: fx.Node,
        shapes: Sequence[Shape],
        results: Sequence[Shape | None],
        operands: list[fx.Node] | None = None,
    ) -> None:
        self.node = node
        self.target: Any = node.target
        self.signature = signature_of(node.target)
        self.operands = tensor_operands(node) if operands is None else operands
        self.shapes = list(shapes)
        self.results = list(results)

    @staticmethod
    def of(node: fx.Node, shape_of: ShapeOf) -> Call:
        types = result_types(node)
        operands = tensor_operands(node)
        shapes = [tuple(shape_of(operand)) for operand in operands]
        if isinstance(node.meta["type"], TensorType):
            return Call(node, shapes, [tuple(shape_of(node))], operands)
        made = shape_of(node) if types else ()
        results = [None if type_ is None else tuple(shape) for type_, shape in zip(types, made, strict=True)]
        return Call(node, shapes, results, operands)

    @property
    def key(self) -> Hashable:
        """What rules read of a call: equal for calls that are alike. Raises TypeError for an argument without a
        hash."""
        numbers: dict[fx.Node, int] = {}

        def number(node: fx.Node) -> Hashable:
            return fx.Node, numbers.setdefault(node, len(numbers)), isinstance(node.meta.get("type"), TensorType)

        arguments = frozen((self.node.args, self.node.kwargs), number)
        types = tuple([operand.meta["type"].dtype for operand in self.operands])
        made = tuple([None if type_ is None else type_.dtype for type_ in result_types(self.node)])
        return self.target, arguments, types, made, tuple(self.shapes), tuple(self.results)

    @property
    def name(self) -> str:
        return op_name(self.target)

    @property
    def result(self) -> Shape:
        """The shape of the only result."""
        (shape,) = self.results
        assert shape is not None
        return shape

    def __getitem__(self, name: str) -> Any:
        value = self.get(name, _MISSING)
        if value is _MISSING:
            raise KeyError(f"{self.name} has no argument '{name}' and no default for it")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return argument(self.node, name, default)

    def shape(self, name: str) -> Shape | None:
        """The shape of the tensor passed as argument `name`; None where none is passed."""
        at = self.position(name)
        return None if at is None else self.shapes[at]

    def position(self, name: str) -> int | None:
        """The index among `operands` of the tensor passed as argument `name`; None where none is passed."""
        value = self.get(name)
        if not isinstance(value, fx.Node) or self.signature is None:
            return None
        at = self.signature.at[name]
        before: list[fx.Node] = []
        if at < len(self.node.args):
            _collect(self.node.args[:at], before)
        else:
            _collect(self.node.args, before)
            for keyword, other in self.node.kwargs.items():
                if keyword == name:
                    break
                _collect((other,), before)
        return len(before)

    def given_in_order(self, names: Sequence[str]) -> bool:
        """Whether each of these arguments is given by position and is a tensor."""
        assert self.signature is not None
        args = self.node.args
        at = self.signature.at
        return all(at[name] < len(args) and isinstance(args[at[name]], fx.Node) for name in names)

    def replace(self, **arguments: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(target, args, kwargs) of this call with the named arguments replaced, where they stand."""
        assert self.signature is not None
        args = list(self.node.args)
        kwargs = dict(self.node.kwargs)
        for name, value in arguments.items():
            at = self.signature.at[name]
            if at < len(args):
                args[at] = value
            else:
                kwargs[name] = value
        return self.target, tuple(args), kwargs


class _Missing:
    pass


_MISSING = _Missing()


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def dims_of(dims: Any, ndim: int) -> list[int]:
    """Dims counted from the front; None and [] stand for all of them."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(ndim))
    listed = [dims] if isinstance(dims, int) else dims
    return [dim_of(dim, ndim) for dim in listed] if ndim else []
