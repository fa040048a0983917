"""Reductions, and the composite ops that are made of them: softmax, norms, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from monarch.compiler.graph import args_of
from monarch.compiler.kernels.lower.coordinates import Affine, At, Unfusable
from monarch.compiler.kernels.lower.values import Lowering, arguments, compute_dtype, handler
from monarch.compiler.loops.signatures import FLOATS

DimsOf = Callable[[fx.Node, int], tuple[int, ...]]

REDUCED: dict[str, tuple[int, DimsOf]] = {}
"""For each op that reduces, the operand whose shape its loops run over, and a function that gives the dims of it that
are reduced, of the call and how many dims that operand has."""


def _dims(given: Any, ndim: int) -> tuple[int, ...]:
    if given is None or given == [] or not ndim:  # a tensor without dims is reduced over dim 0, and stays as it is
        return tuple(range(ndim))
    return tuple(sorted(dim % ndim for dim in ([given] if isinstance(given, int) else given)))


def _simple(packet: str, op: str, *, mean: bool = False) -> None:
    def dims_of(node: fx.Node, ndim: int) -> tuple[int, ...]:
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        if "dim" not in names:
            if "other" in names:
                raise Unfusable("no reduction")
            return tuple(range(ndim))
        if node.target._overloadname == "dim" and op in ("max", "min"):  # type: ignore[union-attr]
            raise Unfusable("a reduction that also gives positions")
        return _dims(arguments(node, "dim")[0], ndim)

    REDUCED[packet] = 0, dims_of

    @handler(packet)
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        source: fx.Node = args_of(node)[0]
        tensor = lower.tensors[source]
        dims = dims_of(node, len(tensor.shape))
        whole = _restored(lower, node, at, dims, len(tensor.shape))
        value = lower.value(source, lower.over(whole, tensor.shape, dims))
        dtype = compute_dtype(lower.tensors[node].dtype)
        if op in ("sum", "prod"):
            value = lower.cast(value, dtype)
        if mean and dtype not in FLOATS:
            raise Unfusable("a mean of integers")
        result = lower.reduce(op, value)
        if mean:
            count = math.prod(tensor.shape[dim] for dim in dims)
            result = lower.op("div", result, lower.constant(count, dtype))
        return result


def _restored(lower: Lowering, node: fx.Node, at: At, dims: Sequence[int], ndim: int) -> At:
    """The coordinates of a reduction's result with those of the reduced dims put in, whatever they are."""
    if len(at) == ndim:
        return at
    rest = iter(at)
    return tuple(lower.zero if dim in dims else next(rest) for dim in range(ndim))


_simple("aten.sum", "sum")
_simple("aten.prod", "prod")
_simple("aten.mean", "sum", mean=True)
_simple("aten.amax", "max")
_simple("aten.amin", "min")
_simple("aten.max", "max")
_simple("aten.min", "min")


class Row:
    """Values along the reduced dims of one operand's shape, around fixed other coordinates."""

    def __init__(self, lower: Lowering, shape: Sequence[int], at: At, dims: Sequence[int]) -> None:
        self.lower = lower
        self.shape, self.dims = shape, dims
        self.at = at
        self.along = lower.over(at, shape, dims)
        self.count = math.prod(shape[dim] for dim in dims)

    def mean(self, value: int) -> int:
        total = self.lower.reduce("sum", value)
        return self.lower.op("div", total, self.lower.constant(self.count, self.lower.dtype(value)))


# -- softmax -----------------------------------------------------------------------------------------------------------


def _last(packet: str, operand: int = 0) -> None:
    REDUCED[packet] = operand, lambda node, ndim: _dims(arguments(node, "dim")[0], ndim)


@handler("aten._softmax", "aten._log_softmax")
def _softmax(lower: Lowering, node: fx.Node, at: At) -> int:
    x, dim = arguments(node, "self", "dim")
    shape, dtype = lower.tensors[x].shape, compute_dtype(lower.tensors[node].dtype)
    row = Row(lower, shape, at, _dims(dim, len(shape)))
    logits = lower.cast(lower.value(x, row.along), dtype)
    most = lower.reduce("max", logits)
    total = lower.reduce("sum", lower.op("exp", lower.op("sub", logits, most)))
    own = lower.op("sub", lower.cast(lower.value(x, at), dtype), most)
    if node.target.overloadpacket.__name__ == "_log_softmax":  # type: ignore[union-attr]
        return lower.op("sub", own, lower.op("log", total))
    return lower.op("div", lower.op("exp", own), total)


@handler("aten._softmax_backward_data")
def _softmax_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    grad, y, dim = arguments(node, "grad_output", "output", "dim")
    shape, dtype = lower.tensors[y].shape, compute_dtype(lower.tensors[y].dtype)
    row = Row(lower, shape, at, _dims(dim, len(shape)))

    def product(at: At) -> int:
        return lower.op("mul", lower.cast(lower.value(grad, at), dtype), lower.cast(lower.value(y, at), dtype))

    total = lower.reduce("sum", product(row.along))
    return lower.op("sub", product(at), lower.op("mul", lower.cast(lower.value(y, at), dtype), total))


@handler("aten._log_softmax_backward_data")
def _log_softmax_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    grad, y, dim = arguments(node, "grad_output", "output", "dim")
    shape, dtype = lower.tensors[y].shape, compute_dtype(lower.tensors[y].dtype)
    row = Row(lower, shape, at, _dims(dim, len(shape)))
    total = lower.reduce("sum", lower.cast(lower.value(grad, row.along), dtype))
    chance = lower.op("exp", lower.cast(lower.value(y, at), dtype))
    return lower.op("sub", lower.cast(lower.value(grad, at), dtype), lower.op("mul", chance, total))


_last("aten._softmax")
_last("aten._log_softmax")
_last("aten._softmax_backward_data", 1)
_last("aten._log_softmax_backward_data", 1)


# -- norms -------------------------------------------------------------------------------------------------------------


def _inner(node: fx.Node, ndim: int) -> tuple[int, ...]:
    (normalized,) = arguments(node, "normalized_shape")
    return tuple(range(ndim - len(normalized), ndim))


def _outer(node: fx.Node, ndim: int) -> tuple[int, ...]:
    (normalized,) = arguments(node, "normalized_shape")
    return tuple(range(ndim - len(normalized)))


def _norm(packet: str, operand: int, results: dict[int, DimsOf]) -> None:
    for number, dims_of in results.items():
        REDUCED[f"{packet}#{number}"] = operand, dims_of


_norm("aten.native_layer_norm", 0, {0: _inner, 1: _inner, 2: _inner})
_norm("aten.native_layer_norm_backward", 1, {0: _inner, 1: _outer, 2: _outer})
_norm("aten._fused_rms_norm", 0, {0: _inner, 1: _inner})
_norm("aten._fused_rms_norm_backward", 1, {0: _inner, 1: _outer})


def _call(node: fx.Node) -> fx.Node:
    """The call whose result number so and so a node is."""
    return args_of(node)[0]


def _statistics(lower: Lowering, call: fx.Node, at: At) -> tuple[int, int]:
    """Mean and reciprocal deviation of the row of an element."""
    x, eps = arguments(call, "input", "eps")
    shape = lower.tensors[x].shape
    row = Row(lower, shape, at, _inner(call, len(shape)))
    values = lower.value(x, row.along)
    mean = row.mean(values)
    apart = lower.op("sub", values, mean)
    variance = row.mean(lower.op("mul", apart, apart))
    return mean, lower.op("rsqrt", lower.op("add", variance, lower.constant(eps, lower.dtype(variance))))


def _weight(lower: Lowering, weight: Any, at: At, dims: Sequence[int]) -> int | None:
    if weight is None:
        return None
    return lower.value(weight, tuple(at[dim] for dim in dims))


@handler("aten.native_layer_norm#0")
def _layer_norm(lower: Lowering, node: fx.Node, at: At) -> int:
    call = _call(node)
    x, weight, bias = arguments(call, "input", "weight", "bias")
    mean, scale = _statistics(lower, call, at)
    inner = _inner(call, len(at))
    result = lower.op("mul", lower.op("sub", lower.value(x, at), mean), scale)
    if (w := _weight(lower, weight, at, inner)) is not None:
        result = lower.op("mul", result, lower.cast(w, lower.dtype(result)))
    if (b := _weight(lower, bias, at, inner)) is not None:
        result = lower.op("add", result, lower.cast(b, lower.dtype(result)))
    return result


@handler("aten.native_layer_norm#1")
def _layer_norm_mean(lower: Lowering, node: fx.Node, at: At) -> int:
    return _statistics(lower, _call(node), at)[0]


@handler("aten.native_layer_norm#2")
def _layer_norm_scale(lower: Lowering, node: fx.Node, at: At) -> int:
    return _statistics(lower, _call(node), at)[1]


def _rms_scale_of(lower: Lowering, call: fx.Node, at: At) -> int:
    x, eps = arguments(call, "input", "eps")
    shape = lower.tensors[x].shape
    if eps is None:
        raise Unfusable("a norm without eps")
    row = Row(lower, shape, at, _inner(call, len(shape)))
    values = lower.value(x, row.along)
    mean = row.mean(lower.op("mul", values, values))
    return lower.op("rsqrt", lower.op("add", mean, lower.constant(eps, lower.dtype(mean))))


@handler("aten._fused_rms_norm#0")
def _rms_norm(lower: Lowering, node: fx.Node, at: At) -> int:
    call = _call(node)
    x, weight = arguments(call, "input", "weight")
    result = lower.op("mul", lower.value(x, at), _rms_scale_of(lower, call, at))
    if (w := _weight(lower, weight, at, _inner(call, len(at)))) is not None:
        result = lower.op("mul", result, lower.cast(w, lower.dtype(result)))
    return result


@handler("aten._fused_rms_norm#1")
def _rms_scale(lower: Lowering, node: fx.Node, at: At) -> int:
    return _rms_scale_of(lower, _call(node), at)


class _Gradient:
    """The shared part of both norms' gradients: the incoming gradient and the normalized input at an element. The
    statistics come from the forward pass, of shape [..., 1, 1]."""

    def __init__(self, lower: Lowering, call: fx.Node) -> None:
        self.lower, self.call = lower, call
        self.grad, self.x, self.weight, self.scale = arguments(call, "grad_out", "input", "weight", "rstd")
        self.centred = "mean" in [argument.name for argument in call.target._schema.arguments]  # type: ignore[union-attr]
        self.mean = arguments(call, "mean")[0] if self.centred else None
        self.shape = lower.tensors[self.x].shape
        self.inner = _inner(call, len(self.shape))

    def _of_row(self, node: fx.Node, at: At) -> int:
        zero: Affine = self.lower.zero
        return self.lower.value(node, tuple(zero if dim in self.inner else c for dim, c in enumerate(at)))

    def rstd(self, at: At) -> int:
        return self._of_row(self.scale, at)

    def normalized(self, at: At) -> int:
        lower = self.lower
        x = lower.cast(lower.value(self.x, at), lower.dtype(self.rstd(at)))
        if self.mean is not None:
            x = lower.op("sub", x, self._of_row(self.mean, at))
        return lower.op("mul", x, self.rstd(at))

    def incoming(self, at: At) -> int:
        return self.lower.cast(self.lower.value(self.grad, at), self.lower.dtype(self.rstd(at)))

    def scaled(self, at: At) -> int:
        grad = self.incoming(at)
        w = _weight(self.lower, self.weight, at, self.inner)
        return grad if w is None else self.lower.op("mul", grad, self.lower.cast(w, self.lower.dtype(grad)))

    def to_input(self, at: At) -> int:
        """`rstd * (g - mean(g) - xhat * mean(g * xhat))`, the first mean only where the norm takes the mean out."""
        lower = self.lower
        row = Row(lower, self.shape, at, self.inner)
        along = lower.op("mul", self.scaled(row.along), self.normalized(row.along))
        result = self.scaled(at)
        if self.centred:
            result = lower.op("sub", result, row.mean(self.scaled(row.along)))
        result = lower.op("sub", result, lower.op("mul", self.normalized(at), row.mean(along)))
        return lower.op("mul", self.rstd(at), result)

    def over_rows(self, at: At) -> At:
        """All rows, at the inner coordinates of a weight's element."""
        outer = _outer(self.call, len(self.shape))
        return self.lower.over((*(self.lower.zero for _ in outer), *at), self.shape, outer)


@handler("aten.native_layer_norm_backward#0", "aten._fused_rms_norm_backward#0")
def _norm_to_input(lower: Lowering, node: fx.Node, at: At) -> int:
    return _Gradient(lower, _call(node)).to_input(at)


@handler("aten.native_layer_norm_backward#1", "aten._fused_rms_norm_backward#1")
def _norm_to_weight(lower: Lowering, node: fx.Node, at: At) -> int:
    gradient = _Gradient(lower, _call(node))
    rows = gradient.over_rows(at)
    return lower.reduce("sum", lower.op("mul", gradient.incoming(rows), gradient.normalized(rows)))


@handler("aten.native_layer_norm_backward#2")
def _norm_to_bias(lower: Lowering, node: fx.Node, at: At) -> int:
    gradient = _Gradient(lower, _call(node))
    return lower.reduce("sum", gradient.incoming(gradient.over_rows(at)))
