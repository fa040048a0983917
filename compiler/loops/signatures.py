"""Which ops the loop IR has, and on which dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monarch.compiler.types import DTYPE_NAMES

FLOATS = (torch.float32, torch.float64)
DTYPES = tuple(dtype for dtype in DTYPE_NAMES if not dtype.is_complex)
"""The dtypes of a buffer."""
INTS = (torch.int32, torch.int64)
BOOL = torch.bool
ARITHMETIC = (*FLOATS, *INTS, BOOL)

_ANY, _NUMBER = ARITHMETIC, (*FLOATS, *INTS)


@dataclass(frozen=True)
class Signature:
    """A pointwise op: how many operands it takes, of which dtypes, and whether it gives bool instead of their dtype.

    All operands have one dtype, but for the condition of `where`, which is bool and comes first.
    """

    operands: int
    dtypes: tuple[torch.dtype, ...]
    gives_bool: bool = False


POINTWISE: dict[str, Signature] = {
    # As in ATen: of max and min NaN comes out where NaN goes in, and of sign 0.
    "neg": Signature(1, _NUMBER),
    "abs": Signature(1, _NUMBER),
    "sign": Signature(1, _NUMBER),
    "add": Signature(2, _NUMBER),
    "sub": Signature(2, _NUMBER),
    "mul": Signature(2, _NUMBER),
    "max": Signature(2, _NUMBER),
    "min": Signature(2, _NUMBER),
    "div": Signature(2, FLOATS),
    "pow": Signature(2, FLOATS),
    "fma": Signature(3, FLOATS),  # a * b + c, rounded once
    "exp": Signature(1, FLOATS),
    "expm1": Signature(1, FLOATS),
    "log": Signature(1, FLOATS),
    "log1p": Signature(1, FLOATS),
    "sqrt": Signature(1, FLOATS),
    "rsqrt": Signature(1, FLOATS),
    "reciprocal": Signature(1, FLOATS),
    "sigmoid": Signature(1, FLOATS),
    "tanh": Signature(1, FLOATS),
    "erf": Signature(1, FLOATS),
    "sin": Signature(1, FLOATS),
    "cos": Signature(1, FLOATS),
    "floor": Signature(1, FLOATS),
    "ceil": Signature(1, FLOATS),
    "round": Signature(1, FLOATS),  # half to even
    "trunc": Signature(1, FLOATS),
    "eq": Signature(2, _ANY, gives_bool=True),
    "ne": Signature(2, _ANY, gives_bool=True),
    "lt": Signature(2, _NUMBER, gives_bool=True),
    "le": Signature(2, _NUMBER, gives_bool=True),
    "gt": Signature(2, _NUMBER, gives_bool=True),
    "ge": Signature(2, _NUMBER, gives_bool=True),
    "isnan": Signature(1, FLOATS, gives_bool=True),
    "and": Signature(2, (BOOL, *INTS)),
    "or": Signature(2, (BOOL, *INTS)),
    "xor": Signature(2, (BOOL, *INTS)),
    "not": Signature(1, (BOOL, *INTS)),
    "shl": Signature(2, INTS),  # the distance has to be from 0 to the number of bits - 1
    "shr": Signature(2, INTS),  # arithmetic: brings in the sign
    "where": Signature(3, _ANY),
    "cast": Signature(1, DTYPES),  # its operand may have any other dtype; from floats to ints it truncates
}
"""The pointwise ops. Integer arithmetic wraps."""

REDUCTIONS: dict[str, tuple[torch.dtype, ...]] = {
    "sum": _NUMBER,
    "prod": _NUMBER,
    "max": _NUMBER,  # NaN if there is one
    "min": _NUMBER,
    "any": (BOOL,),
    "all": (BOOL,),
}
"""The reductions, and the dtypes that they take and give."""
