"""Writes a tape's ops into a graph: nodes with the user's lines, numbers as 0-dim values, decoded arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import Source
from monarch.compiler.graph import Graph, Provenance, Types, tensor_type
from monarch.compiler.tape import Expr, Number, Task, Value
from monarch.compiler.types import TensorType

aten = torch.ops.aten

SEED = "seed"
"""The label of the placeholder that holds a call's seed."""

_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


class Emitter:
    """Appends nodes to a graph: small shape ops, 0-dim arithmetic, and calls with a tape's arguments."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.source: Source | None = None
        self.backward = False
        self.module = ""
        self.task: Task | None = None
        self._small: dict[Any, fx.Node] = {}
        self._seed: fx.Node | None = None
        self._scalars: dict[str, fx.Node] = {}
        self._exprs: dict[Expr, fx.Node] = {}

    # -- nodes ---------------------------------------------------------------------------------------------------

    def call(self, func: Any, *args: Any, type: Types, **kwargs: Any) -> fx.Node:
        """Append an op. Of equal pure ops on 0-dim values only one is made: an optimizer's bias corrections are the
        same for every parameter."""
        key = None
        if isinstance(type, TensorType) and type.ndim == 0 and func is not ops.random:
            key = _small_key(func, args, kwargs)
            if key is not None and (known := self._small.get(key)) is not None:
                return known
        of = Provenance(self.source, self.module, self.backward)
        node = self.graph.call(func, *args, type=type, provenance=of, **kwargs)
        if self.task is not None:
            node.meta["task"] = self.task
        if key is not None:
            self._small[key] = node
        return node

    def item(self, node: fx.Node, index: int, type: Types) -> fx.Node:
        return self.call(operator.getitem, node, index, type=type)

    def reshape(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        type_ = tensor_type(node)
        if type_.shape == tuple(shape):
            return node
        return self.call(aten.view.default, node, list(shape), type=TensorType(type_.dtype, tuple(shape)))

    def permute(self, node: fx.Node, order: list[int]) -> fx.Node:
        if order == sorted(order):
            return node
        type_ = tensor_type(node)
        shape = tuple(type_.shape[dim] for dim in order)
        return self.call(aten.permute.default, node, order, type=TensorType(type_.dtype, shape))

    def expand(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        type_ = tensor_type(node)
        if type_.shape == tuple(shape):
            return node
        return self.call(aten.expand.default, node, list(shape), type=TensorType(type_.dtype, tuple(shape)))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        type_ = tensor_type(node)
        if type_.dtype == dtype:
            return node
        return self.call(aten._to_copy.default, node, type=TensorType(dtype, type_.shape), dtype=dtype)

    def full(self, type: TensorType, value: Any) -> fx.Node:
        if isinstance(value, Expr):
            return self.expand(self.cast(self.number(value), type.dtype), type.shape)
        return self.call(aten.full.default, list(type.shape), value, type=type, dtype=type.dtype)

    # -- numbers -------------------------------------------------------------------------------------------------

    def seed(self) -> fx.Node:
        if self._seed is None:
            self._seed = self.first(lambda: self.graph.placeholder("seed", SEED, TensorType(torch.int64, ())))
        return self._seed

    def scalar(self, label: str, dtype: torch.dtype) -> fx.Node:
        if label not in self._scalars:
            self._scalars[label] = self.first(lambda: self.graph.placeholder("scalar", label, TensorType(dtype, ())))
        return self._scalars[label]

    def first(self, make: Any) -> fx.Node:
        """Make a placeholder, which stands after the other placeholders and before every op."""
        for node in self.graph.fx.nodes:
            if node.op != "placeholder":
                with self.graph.fx.inserting_before(node):
                    made: fx.Node = make()
                return made
        made = make()
        return made

    def number(self, expr: Expr | Number | float) -> Any:
        """An expression as a 0-dim node: f64, or i64 for a whole-numbered scalar. Plain numbers stay as they are."""
        if not isinstance(expr, Expr):
            return expr.value if isinstance(expr, Number) else expr
        known = self._exprs.get(expr)
        if known is None:
            known = self._exprs[expr] = self._number(expr)
        return known

    def _number(self, expr: Expr) -> fx.Node:
        if expr.op == "scalar":
            return self.scalar(expr.args[0], torch.int64 if expr.args[1] == "i64" else torch.float64)
        if expr.op == "item":
            return self.value(expr.args[0])
        type_ = TensorType(torch.float64, ())
        args = [self.number(arg) for arg in expr.args]
        if expr.op in ("neg", "abs", "sqrt", "cos"):
            return self.call(getattr(aten, expr.op).default, *args, type=type_)
        left, right = args
        if expr.op == "pow":
            if not isinstance(left, fx.Node):
                return self.call(aten.pow.Scalar, left, right, type=type_)
            overload = aten.pow.Tensor_Tensor if isinstance(right, fx.Node) else aten.pow.Tensor_Scalar
            return self.call(overload, left, right, type=type_)
        if not isinstance(left, fx.Node):
            if expr.op in ("add", "mul"):
                left, right = right, left
            else:
                left = self.full(type_, left)
        return self.call(getattr(aten, expr.op).Tensor, left, right, type=type_)

    # -- a tape's arguments ----------------------------------------------------------------------------------------

    def value(self, value: Value) -> fx.Node:
        raise NotImplementedError

    def decode(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self.value(argument)
        if isinstance(argument, tuple):
            return [self.decode(entry) for entry in argument]
        if isinstance(argument, (Number, Expr)):
            return self.number(argument)
        return argument

    def decode_kwargs(self, kwargs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        return {name: self.decode(value) for name, value in kwargs if name not in _DROPPED}


def _small_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hashable key of a call on 0-dim nodes and numbers, or None where a larger tensor takes part."""

    def encode(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            type_ = argument.meta["type"]
            if not isinstance(type_, TensorType) or type_.ndim:
                raise ValueError
            return argument
        if isinstance(argument, (list, tuple)):
            return tuple(encode(entry) for entry in argument)
        return repr(argument)

    try:
        return func, tuple(encode(a) for a in args), tuple((k, encode(v)) for k, v in sorted(kwargs.items()))
    except ValueError:
        return None
