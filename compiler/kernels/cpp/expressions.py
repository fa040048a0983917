"""C++ for single values: dtypes, literals, pointwise ops, casts, and how a reduction starts and goes on."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence

import torch

from monarch.compiler.loops.ir import Constant
from monarch.compiler.loops.signatures import BOOL, FLOATS, INTS

TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
"""The C++ type of a value of each dtype; in memory, a bool is a `uint8_t`."""

COSTS = {
    **dict.fromkeys(("div", "sqrt", "reciprocal"), 6),
    "rsqrt": 12,
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "sigmoid"), 16),
    **dict.fromkeys(("tanh", "erf"), 24),
    **dict.fromkeys(("sin", "cos", "pow"), 60),
}
"""The cost of a pointwise op, where an addition is 1."""


def memory_type(dtype: torch.dtype) -> str:
    return "uint8_t" if dtype == BOOL else TYPES[dtype]


def literal(constant: Constant) -> str:
    value, dtype = constant.value, constant.dtype
    if dtype == BOOL:
        return "true" if value else "false"
    if dtype == torch.int32:
        return f"(-{-value - 1} - 1)" if value < 0 else str(value)
    if dtype == torch.int64:
        return f"(-INT64_C({-int(value) - 1}) - 1)" if value < 0 else f"INT64_C({value})"
    suffix = "f" if dtype == torch.float32 else ""
    value = ctypes.c_float(value).value if suffix else float(value)
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        return f"({'-' if value < 0 else ''}__builtin_inf{suffix}())"
    text = f"{value.hex()}{suffix}"
    return f"({text})" if text.startswith("-") else text


def bits(constant: Constant) -> int:
    """A constant as the int64 in which a caller gives it: a float as a double."""
    if constant.dtype not in FLOATS:
        return int(constant.value)
    value = float(constant.value)
    (found,) = struct.unpack(
        "=q", struct.pack("=d", ctypes.c_float(value).value if constant.dtype == torch.float32 else value)
    )
    return int(found)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_CALLS = frozenset(
    "abs max min pow fma exp expm1 log log1p sqrt sigmoid tanh erf sin cos floor ceil round trunc".split()
)


def operation(name: str, args: Sequence[str], dtypes: Sequence[torch.dtype], dtype: torch.dtype) -> str:
    """An op of POINTWISE on values of `dtypes` that are called `args`. Integer overflow wraps (-fwrapv)."""
    if name in _INFIX:
        return f"{args[0]} {_INFIX[name]} {args[1]}"
    if name in _CALLS:
        return f"{name}_({', '.join(args)})"
    (x, *rest), of = args, TYPES[dtype]
    match name:
        case "neg":
            return f"-{x}"
        case "sign":
            return f"({of})({x} > 0) - ({of})({x} < 0)"
        case "rsqrt":
            return f"({of})1 / sqrt_({x})"
        case "reciprocal":
            return f"({of})1 / {x}"
        case "isnan":
            return f"{x} != {x}"
        case "not":
            return f"!{x}" if dtype == BOOL else f"~{x}"
        case "shl":
            return f"({of})((u{of}){x} << ({rest[0]} & {8 * dtype.itemsize - 1}))"
        case "shr":
            return f"{x} >> ({rest[0]} & {8 * dtype.itemsize - 1})"
        case "where":
            if dtype == BOOL:  # in a form that compilers make vectors of
                return f"({x} & {rest[0]}) | (!{x} & {rest[1]})"
            return f"{x} ? {rest[0]} : {rest[1]}"
        case "cast":
            return _cast(x, dtypes[0], dtype)
    raise ValueError(f"no C++ for {name!r}")


def _cast(x: str, source: torch.dtype, target: torch.dtype) -> str:
    if source == target:
        return x
    if source in (torch.float16, torch.bfloat16):
        x, source = f"from_{TYPES[source]}({x})", torch.float32
    if source == BOOL and target.is_floating_point:
        one, zero = (f"{value}{'' if target == torch.float64 else 'f'}" for value in ("1.0", "0.0"))
        x, source = f"({x} ? {one} : {zero})", target if target in FLOATS else torch.float32
        if source == target:
            return x
    if target in (torch.float16, torch.bfloat16):
        return f"to_{TYPES[target]}({x if source == torch.float32 else f'(float){x}'})"
    if target == BOOL:
        return f"{x} != 0"
    if source in FLOATS and target not in (*FLOATS, *INTS):
        return f"({TYPES[target]})(int32_t){x}"
    return f"({TYPES[target]}){x}"


def reduction_start(name: str, dtype: torch.dtype) -> str:
    """The value that a reduction starts from."""
    match name:
        case "sum" | "any":
            return literal(_constant(0, dtype))
        case "prod" | "all":
            return literal(_constant(1, dtype))
    low = name == "max"
    if dtype in FLOATS:
        return literal(Constant(-math.inf if low else math.inf, dtype))
    about = torch.iinfo(dtype)
    return literal(Constant(about.min if low else about.max, dtype))


def _constant(value: int, dtype: torch.dtype) -> Constant:
    return Constant(bool(value) if dtype == BOOL else float(value) if dtype in FLOATS else value, dtype)


REDUCTION_CLAUSE = {"sum": "+", "prod": "*", "max": "max", "min": "min", "any": "|", "all": "&"}
"""OpenMP's names of the reductions."""


def combine(name: str, total: str, value: str) -> str:
    """A statement that takes `value` into `total`. Of max and min, NaN is left out: it is counted beside them."""
    match name:
        case "max":
            return f"{total} = {value} > {total} ? {value} : {total};"
        case "min":
            return f"{total} = {value} < {total} ? {value} : {total};"
    return f"{total} {REDUCTION_CLAUSE[name]}= {value};"


def combine_with_nan(name: str, dtype: torch.dtype, total: str, value: str) -> str:
    """The same, where NaN stays in the total."""
    if name in ("max", "min"):
        return f"{total} = {name}_({total}, {value});"
    return combine(name, total, value)
