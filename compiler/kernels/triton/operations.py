"""Each op of the loop IR in Triton's words.

Rounding is that of ATen on a GPU: quotients and square roots to nearest, exponentials and logarithms by the accurate
functions of libdevice, never the approximations that `tl.exp` or `/` stand for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from monarch.compiler.loops.ir import Constant
from monarch.compiler.loops.signatures import BOOL, DTYPES, FLOATS

TYPES = {dtype: "tl.int1" if dtype == BOOL else str(dtype).replace("torch", "tl") for dtype in DTYPES}

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
"""In these a constant stands as a literal beside an operand that is none: Triton then gives it that operand's dtype."""

_NAN = "propagate_nan=tl.PropagateNan.ALL"
_CALLS = {
    "abs": "tl.abs({0})",
    "fma": "tl.fma({0}, {1}, {2})",
    "pow": "libdevice.pow({0}, {1})",
    **{name: f"libdevice.{name}({{0}})" for name in "exp expm1 log log1p tanh erf sin cos trunc".split()},
    **{name: f"tl.{name}({{0}})" for name in ("rsqrt", "floor", "ceil")},
    "round": "libdevice.nearbyint({0})",
    "isnan": "{0} != {0}",
    "not": "~{0}",
    "where": "tl.where({0}, {1}, {2})",
}
_FLOAT32 = {
    "neg": "{0} * -1.0",  # Triton's own minus is 0 - x, which loses the sign of zero
    "div": "tl.div_rn({0}, {1})",
    "sqrt": "tl.sqrt_rn({0})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sigmoid": "tl.div_rn(1.0, 1.0 + libdevice.exp({0} * -1.0))",
}
_FLOAT64 = {
    "neg": "{0} * -1.0",
    "div": "{0} / {1}",
    "sqrt": "tl.sqrt({0})",
    "reciprocal": "1.0 / {0}",
    "sigmoid": "1.0 / (1.0 + libdevice.exp({0} * -1.0))",
}


def operation(name: str, args: Sequence[str], of: torch.dtype, to: torch.dtype) -> str:
    """The expression of an op on variables, or literals where it is in INFIX; `of` is the dtype of its last operand,
    `to` that of its result."""
    if name == "cast":
        return _cast(args[0], of, to)
    if name in INFIX:
        return f"{args[0]} {INFIX[name]} {args[1]}"
    if name in ("max", "min"):
        return f"tl.{name}imum({', '.join(args)}{f', {_NAN}' if of in FLOATS else ''})"
    if name == "sign":  # 0 for NaN
        return f"({args[0]} > 0).to({TYPES[of]}) - ({args[0]} < 0).to({TYPES[of]})"
    if name == "neg" and of not in FLOATS:
        return f"0 - {args[0]}"
    table = _FLOAT32 if of == torch.float32 else _FLOAT64
    return (table.get(name) or _CALLS[name]).format(*args)


def _cast(value: str, of: torch.dtype, to: torch.dtype) -> str:
    if of == to:
        return value
    if to == BOOL:
        return f"{value} != 0"
    narrow = (torch.float16, torch.bfloat16)
    if to in narrow and of != torch.float32 or of in narrow and to != torch.float32:
        value = f"{value}.to(tl.float32)"  # as ATen does, which has no other way to or from these
    if of.is_floating_point and to in (torch.uint8, torch.int8, torch.int16):
        value = f"{value}.to(tl.int64)"  # then wraps
    return f"{value}.to({TYPES[to]})"


def literal(constant: Constant) -> str | None:
    """A number as an expression has it; None for one without a literal."""
    if constant.dtype == BOOL or isinstance(constant.value, float) and not math.isfinite(constant.value):
        return None
    return _number(constant)


def full(constant: Constant) -> str:
    value = constant.value
    finite = not isinstance(value, float) or math.isfinite(value)
    text = _number(constant) if finite else f'float("{value}")'
    return f"tl.full([], {text}, {TYPES[constant.dtype]})"


def _number(constant: Constant) -> str:
    """A number in as few digits as tell it from the others of its dtype."""
    if constant.dtype != torch.float32:
        return repr(constant.value)
    with np.errstate(over="ignore"):
        rounded = np.float32(constant.value)
    text = str(rounded)
    return text if np.isfinite(rounded) and np.float32(float(text)) == rounded else repr(constant.value)


# Reductions ----------------------------------------------------------------------------------------------------------

COMBINERS = {
    "larger": f"return tl.maximum(a, b, {_NAN})",
    "smaller": f"return tl.minimum(a, b, {_NAN})",
    "product": "return a * b",
}
"""The bodies of the functions that reductions call where Triton has none that would do: `tl.max` drops NaN."""


def reduction_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a reduction's accumulator; bool is counted in i32."""
    return torch.int32 if dtype == BOOL else dtype


def identity(name: str, dtype: torch.dtype) -> str:
    """The neutral element of a reduction, as a literal, of `reduction_dtype(dtype)`."""
    if name == "sum":
        return "0.0" if dtype in FLOATS else "0"
    if name == "prod":
        return "1.0" if dtype in FLOATS else "1"
    if name in ("any", "all"):
        return "0" if name == "any" else "1"
    if dtype in FLOATS:
        return f'float("{"-inf" if name == "max" else "inf"}")'
    limits = torch.iinfo(dtype)
    return repr(limits.min if name == "max" else limits.max)


def accumulate(name: str, dtype: torch.dtype, a: str, b: str) -> str:
    """The expression that takes one more value into an accumulator."""
    if name == "sum":
        return f"{a} + {b}"
    if name == "prod":
        return f"{a} * {b}"
    larger = name in ("max", "any")
    return f"tl.{'maximum' if larger else 'minimum'}({a}, {b}{f', {_NAN}' if dtype in FLOATS else ''})"


def reduce_tile(name: str, dtype: torch.dtype, value: str, axis: int, keep: bool) -> tuple[str, str]:
    """The expression that reduces a tile along an axis, and which of COMBINERS it calls, if any."""
    kept = ", keep_dims=True" if keep else ""
    if name == "sum":
        return f"tl.sum({value}, {axis}{kept})", ""
    if name in ("any", "all"):
        return f"tl.{'max' if name == 'any' else 'min'}({value}, {axis}{kept})", ""
    if name != "prod" and dtype not in FLOATS:
        return f"tl.{name}({value}, {axis}{kept})", ""
    combiner = {"max": "larger", "min": "smaller", "prod": "product"}[name]
    return f"tl.reduce({value}, {axis}, {combiner}{kept})", combiner
