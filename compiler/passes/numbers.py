"""Ops whose number arguments may be known only when the step runs: which they are, and their form on tensors.

aten.add.Tensor(x, y, alpha=s)     -->  aten.addcmul(x, y, s)
aten.mul.Tensor(x, s)              -->  aten.mul.Tensor(x, s as f32[])
aten.addcdiv(x, a, b, value=s)     -->  aten.addcdiv(x, aten.mul.Tensor(a, s), b)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from monarch.compiler.errors import ProgramError
from monarch.compiler.graph import Types
from monarch.compiler.tape import Expr, Value
from monarch.compiler.types import TensorType

if TYPE_CHECKING:
    from monarch.compiler.passes.emitter import Emitter

aten = torch.ops.aten

# For each packet the number arguments that may be Exprs, by position or name. "whole" ops take ints as well as floats.
_ARITHMETIC = (aten.add, aten.sub, aten.mul, aten.div)
_BINARY = (
    *_ARITHMETIC,
    *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
    *(aten.maximum, aten.minimum, aten.remainder, aten.fmod),
)
_TABLE: dict[Any, tuple[int | str, ...]] = {
    **dict.fromkeys(_BINARY, (1,)),
    aten.add: (1, "alpha"),
    aten.sub: (1, "alpha"),
    aten.rsub: (1,),
    aten.pow: (0, 1),
    aten.addcmul: ("value",),
    aten.addcdiv: ("value",),
    aten.lerp: (2,),
    aten.masked_fill: (2,),
    aten.clamp: (1, 2, "min", "max"),
    aten.clamp_min: (1,),
    aten.clamp_max: (1,),
    aten.fill_: (1,),
    aten.full: (1, "fill_value"),
    aten.full_like: (1, "fill_value"),
}


def _out_of_place(packet: Any) -> Any:
    name = packet.__name__
    return getattr(aten, name[:-1], packet) if name.endswith("_") and not name.endswith("__") else packet


_known: dict[Any, frozenset[int | str]] = {}


def number_arguments(func: Any) -> frozenset[int | str]:
    """The arguments (positions and names) of an ATen overload that may be numbers known only when the step runs."""
    known = _known.get(func)
    if known is None:
        packet = func.overloadpacket
        where = _TABLE.get(packet) or _TABLE.get(_out_of_place(packet)) or ()
        known = _known[func] = frozenset(where)
    return known


def takes_whole_numbers(func: Any) -> bool:
    """Whether an int argument of this op may be known only when the step runs (elsewhere ints are shapes and
    exponents)."""
    return _out_of_place(func.overloadpacket) in _ARITHMETIC


def with_tensors(
    emit: Emitter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Types, first: Value
) -> tuple[Any, list[Any], dict[str, Any]]:
    """A functional overload whose arguments hold Exprs, as (overload, arguments, keywords) on 0-dim tensors.

    `types` is the result's, `first` the first tensor argument. Raises ProgramError for an op that takes no such number.
    """
    packet = func.overloadpacket
    numeric = number_arguments(func)
    places = [i for i, a in enumerate(args) if isinstance(a, Expr)] + [
        k for k, v in kwargs.items() if isinstance(v, Expr)
    ]
    if not isinstance(types, TensorType) or any(place not in numeric for place in places):
        raise ProgramError(
            f"{packet} takes no number that changes from call to call",
            hint="a float argument of the program or an optimizer's hyperparameter reached it: "
            "make it a tensor argument, or use float(x) to build its value in.",
            source=emit.source,
        )
    dtype = _compute_dtype(types, first)

    def number(value: Any) -> Any:
        return emit.cast(emit.number(value), dtype) if isinstance(value, Expr) else emit.decode(value)

    def tensor(value: Any) -> fx.Node:
        decoded = number(value)
        if isinstance(decoded, fx.Node):
            return decoded
        return emit.full(TensorType(dtype, ()), decoded)

    values = [number(a) for a in args]
    if packet in (aten.add, aten.sub) and "alpha" in kwargs:
        x, y = values[0], tensor(args[1])
        alpha = kwargs["alpha"]
        scale = number(Expr("neg", (alpha,)) if packet is aten.sub and isinstance(alpha, Expr) else alpha)
        if packet is aten.sub and not isinstance(alpha, Expr):
            scale = -scale
        if not isinstance(scale, fx.Node):
            return aten.add.Tensor, [x, y], {"alpha": scale}
        return aten.addcmul.default, [x, y, scale], {}
    if packet in (aten.addcmul, aten.addcdiv):
        x, a, b = values
        scaled = emit.call(aten.mul.Tensor, a, number(kwargs["value"]), type=a.meta["type"])
        return func, [x, scaled, b], {}
    if packet is aten.rsub:
        return aten.sub.Tensor, [values[1], values[0]], {}
    if packet is aten.pow:
        return aten.pow.Tensor_Tensor, [tensor(args[0]), tensor(args[1])], {}
    if packet is aten.lerp:
        return aten.lerp.Tensor, values, {}
    if packet is aten.masked_fill:
        return aten.masked_fill.Tensor, values, {}
    if packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
        return _clamp(packet, values, kwargs, tensor, args)
    if packet is aten.div and func is aten.div.Scalar:
        return aten.div.Tensor, values, {}
    if packet in _BINARY:
        keywords = {name: emit.decode(value) for name, value in kwargs.items()}
        overload = func if func._schema.overload_name in ("Tensor", "Tensor_mode", "default") else packet.Tensor
        return overload, values, keywords
    raise ProgramError(f"{packet} takes no number that changes from call to call", source=emit.source)


def _clamp(packet: Any, values: list[Any], kwargs: dict[str, Any], tensor: Any, args: tuple[Any, ...]) -> Any:
    low = high = None
    if packet is aten.clamp_min:
        low = args[1]
    elif packet is aten.clamp_max:
        high = args[1]
    else:
        low = args[1] if len(args) > 1 else kwargs.get("min")
        high = args[2] if len(args) > 2 else kwargs.get("max")
    bounds = [None if bound is None else tensor(bound) for bound in (low, high)]
    return aten.clamp.Tensor, [values[0], *bounds], {}


def _compute_dtype(out: TensorType, first: Value) -> torch.dtype:
    """The dtype in which an op takes its number: the result's, and f32 for half-width floats, as ATen's kernels do.

    A comparison gives bools, so there the tensor's own dtype counts. A 0-dim half-width result has to stay what it is.
    """
    dtype = first.dtype if out.dtype == torch.bool else out.dtype
    if not dtype.is_floating_point:
        return torch.float32 if out.dtype == torch.bool else dtype
    if dtype in (torch.bfloat16, torch.float16) and first.shape:
        return torch.float32
    return dtype
