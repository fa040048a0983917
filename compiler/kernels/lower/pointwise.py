"""Pointwise ops, as ATen computes them: in the promoted dtype of their operands (f32 for bf16 and f16)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from monarch.compiler.graph import args_of
from monarch.compiler.kernels.lower.coordinates import At, Gathered, Unfusable
from monarch.compiler.kernels.lower.values import Lowering, arguments, compute_dtype, handler
from monarch.compiler.loops.signatures import BOOL, FLOATS


def _inputs(lower: Lowering, node: fx.Node, at: At, *names: str, dtype: torch.dtype | None = None) -> list[int]:
    """The operands of those names, broadcast and in one dtype: by default the promoted one."""
    operands = arguments(node, *names)
    shape = lower.tensors[node].shape
    if dtype is not None:
        return [lower.operand(operand, at, shape, dtype) for operand in operands]
    common = lower.common(*operands)
    return [lower.converted(operand, at, shape, common) for operand in operands]


def _factors(lower: Lowering, node: fx.Node, at: At) -> list[int]:
    """The operands of a product or quotient: ATen does not round the second one to bf16 where it is a number."""
    a, b = arguments(node, "self", "other")
    shape, common = lower.tensors[node].shape, lower.common(a, b)
    factor = lower.converted(a, at, shape, common)
    if not isinstance(b, fx.Node) or not lower.tensors[b].shape:
        return [factor, lower.operand(b, at, shape, compute_dtype(common))]
    return [factor, lower.converted(b, at, shape, common)]


def _float(lower: Lowering, node: fx.Node) -> torch.dtype:
    """The float dtype in which an op computes on an operand that may be of integers."""
    (operand,) = arguments(node, "self")
    dtype = lower.promoted(operand)
    return dtype if dtype in FLOATS else torch.float32


def _unary(name: str) -> None:
    @handler(f"aten.{name}")
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        (x,) = _inputs(lower, node, at, "self", dtype=_float(lower, node))
        return lower.op(name, x)


for _name in "exp expm1 log log1p sqrt rsqrt reciprocal sigmoid tanh erf sin cos".split():
    _unary(_name)


def _on_numbers(name: str, op: str) -> None:
    """An op that keeps its operand's dtype; of integers, rounding does nothing."""

    @handler(f"aten.{name}")
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        (x,) = _inputs(lower, node, at, "self")
        if lower.dtype(x) == BOOL:
            raise Unfusable(f"{name} of bool")
        rounds = op in ("floor", "ceil", "round", "trunc")
        return x if rounds and lower.dtype(x) not in FLOATS else lower.op(op, x)


for _name, _op in {"neg": "neg", "abs": "abs", "sgn": "sign", "sign": "sign"}.items():
    _on_numbers(_name, _op)
for _name in "floor ceil trunc".split():
    _on_numbers(_name, _name)


@handler("aten.round")
def _round(lower: Lowering, node: fx.Node, at: At) -> int:
    if node.target._overloadname != "default":  # type: ignore[union-attr]
        raise Unfusable("round to decimals")
    (x,) = _inputs(lower, node, at, "self")
    return lower.op("round", x) if lower.dtype(x) in FLOATS else x


def _times_alpha(lower: Lowering, node: fx.Node, value: int) -> int:
    """`value * alpha`; alpha is rounded as the operands are."""
    common = lower.common(*arguments(node, "self", "other"))
    (alpha,) = arguments(node, "alpha")
    return value if alpha == 1 else lower.op("mul", value, lower.converted(alpha, (), (), common))


def _scaled(lower: Lowering, value: int, factor: float) -> int:
    """`value * factor`, left out where it is 1."""
    return value if factor == 1 else lower.op("mul", value, lower.constant(factor, lower.dtype(value)))


@handler("aten.add", "aten.sub")
def _add(lower: Lowering, node: fx.Node, at: At) -> int:
    a, b = _inputs(lower, node, at, "self", "other")
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    if lower.dtype(a) == BOOL:
        raise Unfusable(f"{name} of bools")
    return lower.op(name, a, _times_alpha(lower, node, b))


@handler("aten.mul")
def _mul(lower: Lowering, node: fx.Node, at: At) -> int:
    a, b = _factors(lower, node, at)
    return lower.op("and" if lower.dtype(a) == BOOL else "mul", a, b)


@handler("aten.div")
def _div(lower: Lowering, node: fx.Node, at: At) -> int:
    if "mode" in node.target._overloadname:  # type: ignore[union-attr]
        raise Unfusable("a rounded division")
    if lower.promoted(*arguments(node, "self", "other")) in FLOATS:
        return lower.op("div", *_factors(lower, node, at))
    return lower.op("div", *_inputs(lower, node, at, "self", "other", dtype=torch.float32))


@handler("aten.rsub")
def _rsub(lower: Lowering, node: fx.Node, at: At) -> int:
    a, b = _inputs(lower, node, at, "self", "other")
    return lower.op("sub", b, _times_alpha(lower, node, a))


def _extreme(name: str, op: str, other: str) -> None:
    @handler(f"aten.{name}")
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        return lower.op(op, *_inputs(lower, node, at, "self", other))


_extreme("maximum", "max", "other")
_extreme("minimum", "min", "other")
_extreme("clamp_min", "max", "min")
_extreme("clamp_max", "min", "max")


@handler("aten.clamp")
def _clamp(lower: Lowering, node: fx.Node, at: At) -> int:
    x, low, high = arguments(node, "self", "min", "max")
    common = lower.common(*(each for each in (x, low, high) if each is not None))
    shape = lower.tensors[node].shape
    value = lower.converted(x, at, shape, common)
    if low is not None:
        value = lower.op("max", value, lower.converted(low, at, shape, common))
    return value if high is None else lower.op("min", value, lower.converted(high, at, shape, common))


@handler("aten.relu")
def _relu(lower: Lowering, node: fx.Node, at: At) -> int:
    (x,) = _inputs(lower, node, at, "self")
    return lower.op("max", x, lower.constant(0, lower.dtype(x)))


@handler("aten.square")
def _square(lower: Lowering, node: fx.Node, at: At) -> int:
    (x,) = _inputs(lower, node, at, "self")
    return lower.op("mul", x, x)


@handler("aten.pow")
def _pow(lower: Lowering, node: fx.Node, at: At) -> int:
    base, exponent = arguments(node, "self", "exponent")
    common, dtype = lower.common(base, exponent), lower.promoted(base, exponent)
    if dtype not in FLOATS:
        raise Unfusable("a power of integers")
    shape = lower.tensors[node].shape
    x = lower.converted(base, at, shape, common)
    if isinstance(exponent, fx.Node):
        return lower.op("pow", x, lower.converted(exponent, at, shape, common))
    # The powers that ATen computes otherwise.
    if exponent == 0:
        return lower.constant(1, dtype)
    if exponent == 1:  # as in the gradient of a square
        return x
    if exponent == 2:
        return lower.op("mul", x, x)
    if exponent == 3:
        square = lower.op("mul", x, x)  # which ATen rounds in bf16, and not in f16
        return lower.op("mul", lower.rounded_to(square, common) if common == torch.bfloat16 else square, x)
    if exponent == 0.5:
        return lower.op("sqrt", x)
    if exponent == -0.5:
        return lower.op("rsqrt", x)
    if exponent == -1:
        return lower.op("reciprocal", x)
    return lower.op("pow", x, lower.converted(exponent, at, shape, common))


# -- comparisons and logic ---------------------------------------------------------------------------------------------


def _comparison(name: str) -> None:
    @handler(f"aten.{name}")
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        a, b = _inputs(lower, node, at, "self", "other")
        if lower.dtype(a) == BOOL and name not in ("eq", "ne"):
            raise Unfusable(f"{name} of bools")
        return lower.op(name, a, b)


for _name in "eq ne lt le gt ge".split():
    _comparison(_name)


def _truth(lower: Lowering, value: int) -> int:
    dtype = lower.dtype(value)
    return value if dtype == BOOL else lower.op("ne", value, lower.constant(0, dtype))


def _logical(op: str) -> None:
    @handler(f"aten.logical_{op}")
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        shape = lower.tensors[node].shape
        operands = [each for each in args_of(node) if isinstance(each, fx.Node)]
        return lower.op(op, *(_truth(lower, lower.operand(each, at, shape)) for each in operands))


def _bitwise(op: str) -> None:
    @handler(f"aten.bitwise_{op}")
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        names = ("self",) if op == "not" else ("self", "other")
        return lower.op(op, *_inputs(lower, node, at, *names))


for _name in "and or xor not".split():
    _logical(_name)
    _bitwise(_name)


@handler("aten.isnan")
def _isnan(lower: Lowering, node: fx.Node, at: At) -> int:
    (x,) = _inputs(lower, node, at, "self")
    return lower.op("isnan", x) if lower.dtype(x) in FLOATS else lower.constant(False, BOOL)


@handler("aten.where")
def _where(lower: Lowering, node: fx.Node, at: At) -> int:
    condition, yes, no = args_of(node)
    shape = lower.tensors[node].shape
    dtype = lower.promoted(yes, no)
    chosen = lower.operand(condition, at, shape)
    return lower.op("where", chosen, lower.operand(yes, at, shape, dtype), lower.operand(no, at, shape, dtype))


@handler("aten.masked_fill")
def _masked_fill(lower: Lowering, node: fx.Node, at: At) -> int:
    x, mask, value = arguments(node, "self", "mask", "value")
    shape, dtype = lower.tensors[node].shape, compute_dtype(lower.tensors[node].dtype)
    chosen = lower.operand(mask, at, shape)
    return lower.op("where", chosen, lower.operand(value, at, shape, dtype), lower.operand(x, at, shape, dtype))


@handler("aten._to_copy", "prims.convert_element_type")
def _cast(lower: Lowering, node: fx.Node, at: At) -> int:
    x: fx.Node = args_of(node)[0]
    target = lower.tensors[node].dtype
    value = lower.value(x, at)
    if target in (torch.int16, torch.int8, torch.uint8):
        raise Unfusable(f"values of {target}")
    return lower.cast(value, compute_dtype(target))


# -- what optimizers and activations are made of ----------------------------------------------------------------------


@handler("aten.lerp")
def _lerp(lower: Lowering, node: fx.Node, at: At) -> int:
    start, end, weight = arguments(node, "self", "end", "weight")
    shape, dtype = lower.tensors[node].shape, lower.promoted(start, end)
    a, b = lower.operand(start, at, shape, dtype), lower.operand(end, at, shape, dtype)
    apart = lower.op("sub", b, a)
    if isinstance(weight, fx.Node):
        w = lower.operand(weight, at, shape, dtype)
        one = lower.constant(1, dtype)
        near = lower.op("add", a, lower.op("mul", w, apart))
        far = lower.op("sub", b, lower.op("mul", apart, lower.op("sub", one, w)))
        small = lower.op("lt", lower.op("abs", w), lower.constant(0.5, dtype))
        return lower.op("where", small, near, far)
    # ATen starts from the nearer end, so that weight 1 gives `end` exactly.
    if abs(weight) < 0.5:
        return lower.op("add", a, lower.op("mul", lower.constant(weight, dtype), apart))
    return lower.op("sub", b, lower.op("mul", apart, lower.constant(1 - weight, dtype)))


def _added(op: str) -> None:
    @handler(f"aten.addc{op}")
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        x, a, b = _inputs(lower, node, at, "self", "tensor1", "tensor2")
        (value,) = arguments(node, "value")
        return lower.op("add", x, lower.op(op, _scaled(lower, a, value), b))


_added("mul")
_added("div")


@handler("aten.silu")
def _silu(lower: Lowering, node: fx.Node, at: At) -> int:
    (x,) = _inputs(lower, node, at, "self", dtype=_float(lower, node))
    return lower.op("mul", x, lower.op("sigmoid", x))


@handler("aten.silu_backward")
def _silu_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    grad, x = _inputs(lower, node, at, "grad_output", "self")
    one = lower.constant(1, lower.dtype(x))
    gate = lower.op("sigmoid", x)
    slope = lower.op("add", one, lower.op("mul", x, lower.op("sub", one, gate)))
    return lower.op("mul", lower.op("mul", grad, gate), slope)


@handler("aten.sigmoid_backward")
def _sigmoid_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    grad, y = _inputs(lower, node, at, "grad_output", "output")
    rest = lower.op("sub", lower.constant(1, lower.dtype(y)), y)
    return lower.op("mul", lower.op("mul", grad, rest), y)


@handler("aten.tanh_backward")
def _tanh_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    grad, y = _inputs(lower, node, at, "grad_output", "output")
    return lower.op("mul", grad, lower.op("sub", lower.constant(1, lower.dtype(y)), lower.op("mul", y, y)))


@handler("aten.threshold_backward")
def _threshold_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    grad, x = _inputs(lower, node, at, "grad_output", "self")
    (threshold,) = arguments(node, "threshold")
    dtype = lower.dtype(x)
    below = lower.op("le", x, lower.constant(threshold, dtype))
    return lower.op("where", below, lower.constant(0, dtype), grad)


class _Terms:
    """Arithmetic on values of one nest, written as formulas."""

    def __init__(self, lower: Lowering, dtype: torch.dtype) -> None:
        self.lower, self.dtype = lower, dtype

    def mul(self, *factors: int | float) -> int:
        return self._chain("mul", factors)

    def add(self, *terms: int | float) -> int:
        return self._chain("add", terms)

    def _chain(self, op: str, parts: tuple[int | float, ...]) -> int:
        values = [self.lower.constant(p, self.dtype) if isinstance(p, float) else p for p in parts]
        result = values[0]
        for value in values[1:]:
            result = self.lower.op(op, result, value)
        return result


_TANH_A, _TANH_B = math.sqrt(2 / math.pi), 0.044715


@handler("aten.gelu")
def _gelu(lower: Lowering, node: fx.Node, at: At) -> int:
    (x,) = _inputs(lower, node, at, "self")
    (approximate,) = arguments(node, "approximate")
    t = _Terms(lower, lower.dtype(x))
    if approximate == "tanh":
        inner = t.mul(_TANH_A, t.add(x, t.mul(_TANH_B, x, x, x)))
        return t.mul(t.mul(0.5, x), t.add(1.0, lower.op("tanh", inner)))
    return t.mul(t.mul(0.5, x), t.add(1.0, lower.op("erf", t.mul(x, math.sqrt(0.5)))))


@handler("aten.gelu_backward")
def _gelu_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    grad, x = _inputs(lower, node, at, "grad_output", "self")
    (approximate,) = arguments(node, "approximate")
    t = _Terms(lower, lower.dtype(x))
    if approximate == "tanh":
        inner = t.mul(_TANH_A, t.add(x, t.mul(_TANH_B, x, x, x)))
        tanh = lower.op("tanh", inner)
        left = t.mul(0.5, t.add(1.0, tanh))
        slope = t.add(1.0, lower.op("neg", t.mul(tanh, tanh)))
        inner_slope = t.mul(_TANH_A, t.add(1.0, t.mul(3 * _TANH_B, x, x)))
        return t.mul(grad, t.add(left, t.mul(t.mul(0.5, x), slope, inner_slope)))
    below = t.mul(0.5, t.add(1.0, lower.op("erf", t.mul(x, math.sqrt(0.5)))))
    density = t.mul(lower.op("exp", t.mul(-0.5, x, x)), 1 / math.sqrt(2 * math.pi))
    return t.mul(grad, t.add(below, t.mul(x, density)))


# -- lookups -----------------------------------------------------------------------------------------------------------


@handler("aten.embedding")
def _embedding(lower: Lowering, node: fx.Node, at: At) -> int:
    weight, indices = arguments(node, "weight", "indices")
    row = lower.cast(lower.value(indices, at[:-1]), torch.int64)
    return lower.load(weight, (Gathered(row, lower.tensors[weight].shape[0]), at[-1]))


@handler("aten.gather")
def _gather(lower: Lowering, node: fx.Node, at: At) -> int:
    x, dim, index = arguments(node, "self", "dim", "index")
    found: list[Any] = list(at)
    if not found:
        raise Unfusable("a gather of one element")
    found[dim] = Gathered(lower.value(index, at), lower.tensors[x].shape[dim])
    return lower.value(x, tuple(found))


def _own(lower: Lowering, index: int, mesh_dim: str, length: int) -> int:
    """A global index as one into this worker's block of `length`, which fails where it is no worker's."""
    index = lower.cast(index, torch.int64)
    place = lower.checked(lower.places[mesh_dim], index, length * lower.sizes[mesh_dim])
    return lower.op("sub", index, lower.op("mul", place, lower.constant(length, torch.int64)))


@handler("gather_shard")
def _gather_shard(lower: Lowering, node: fx.Node, at: At) -> int:
    x, dim, index, mesh_dim = args_of(node)
    length = lower.tensors[x].shape[dim]
    local = _own(lower, lower.value(index, at), mesh_dim, length)
    zero = lower.constant(0, torch.int64)
    here = lower.op("and", lower.op("ge", local, zero), lower.op("lt", local, lower.constant(length, torch.int64)))
    found: list[Any] = list(at)
    found[dim] = Gathered(lower.op("where", here, local, zero), length)
    value = lower.value(x, tuple(found))
    return lower.op("where", here, value, lower.constant(0, lower.dtype(value)))


@handler("scatter_shard")
def _scatter_shard(lower: Lowering, node: fx.Node, at: At) -> int:
    """One number at one index in each row: a comparison with the position."""
    x, dim, index, value, mesh_dim = args_of(node)
    shape = lower.tensors[x].shape
    dim %= len(shape)
    if isinstance(value, fx.Node) or lower.tensors[index].shape != (*shape[:dim], 1, *shape[dim + 1 :]):
        raise Unfusable("a scatter of several elements")
    place = lower.value(index, (*at[:dim], lower.zero, *at[dim + 1 :]))
    here = lower.op("eq", lower.position(at[dim]), _own(lower, place, mesh_dim, shape[dim]))
    other = lower.value(x, at)
    return lower.op("where", here, lower.constant(value, lower.dtype(other)), other)


@handler("aten.nll_loss_backward")
def _nll_loss_backward(lower: Lowering, node: fx.Node, at: At) -> int:
    """`-grad` (over the weight of all valid targets, for a mean) at each row's target, 0 elsewhere."""
    grad, target, weight, reduction, ignore, total = arguments(
        node, "grad_output", "target", "weight", "reduction", "ignore_index", "total_weight"
    )
    if weight is not None or len(at) != 2:
        raise Unfusable("a weighted loss")
    dtype = compute_dtype(lower.tensors[node].dtype)
    label = lower.value(target, at[:1])
    slope = lower.op("neg", lower.operand(grad, at[:1], lower.tensors[node].shape[:1], dtype))
    if reduction == 1:
        slope = lower.op("div", slope, lower.operand(total, at[:1], lower.tensors[node].shape[:1], dtype))
    valid = lower.op("ne", label, lower.constant(ignore, torch.int64))
    zero = lower.constant(0, torch.int64)
    label = lower.checked_load(label, lower.op("where", valid, label, zero), lower.tensors[node].shape[1])
    here = lower.op("eq", lower.position(at[1]), label)
    return lower.op("where", lower.op("and", here, valid), slope, lower.constant(0, dtype))
