"""Pointwise ops: every operand broadcasts against the others, so any dim shards. They differ only in what is linear."""

from __future__ import annotations

from collections.abc import Iterable

from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, line
from monarch.compiler.rules.register import sharding_rule


def pointwise(names: str, operands: int, linear: Iterable[Iterable[int]] = (), results: int = 1) -> None:
    """Register ops by name; a name without a namespace is ATen's."""
    text = f"{', '.join(['...'] * operands)} -> {', '.join(['...'] * results)}"
    for name in names.split():
        sharding_rule(name if "." in name else f"aten.{name}", text, linear=linear)


# One operand. Casts are linear between floats up to the rounding of the result's dtype; `rule_for` drops what dtypes forbid.
pointwise(
    """
    alias clone conj contiguous deg2rad detach lift_fresh lift_fresh_copy neg positive rad2deg _conj _to_copy to
    prims.convert_element_type prims.device_put
    """,
    1,
    linear=[{0}],
)
pointwise(
    """
    abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min cos cosh digamma
    elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan
    isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit mish nan_to_num polygamma reciprocal
    relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_bessel_j0
    special_erfcx special_i0e special_i1 special_i1e special_ndtri special_log_ndtr sqrt square tan tanh threshold trunc
    """,
    1,
)
pointwise("log_sigmoid_forward.default", 1, results=2)

# The shape of the operand, not its values: zeros of the local shape are the local block of the zeros.
pointwise("zeros_like", 1, linear=[{0}])
pointwise("empty_like full_like ones_like", 1)

# Two operands.
pointwise("add sub rsub", 2, linear=[{0, 1}])
pointwise("mul", 2, linear=[{0}, {1}])
pointwise("copy", 2, linear=[{1}, {0, 1}])
pointwise(
    """
    atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp_max.Tensor clamp_min.Tensor
    copysign eq floor_divide fmax fmin fmod gcd ge gt heaviside hypot lcm le logaddexp logaddexp2 logical_and logical_or
    logical_xor lt maximum minimum ne nextafter pow remainder special_xlog1py special_zeta xlogy
    __and__ __or__ __xor__ __lshift__ __rshift__ _prelu_kernel
    """,
    2,
)
pointwise("pow.Tensor_Scalar pow.Scalar", 1)


@sharding_rule("aten.div")
def _div(call: Call) -> Line:
    # Rounding a quotient is not linear.
    return line("..., ... -> ...", linear=[{0}] if call.get("rounding_mode") is None else [])


sharding_rule("aten.true_divide", "..., ... -> ...", linear=[{0}])

# Three operands.
pointwise("where", 3, linear=[{1, 2}])
pointwise("lerp.Scalar", 2, linear=[{0, 1}])
pointwise("lerp.Tensor", 3, linear=[{0, 1}])
pointwise("addcmul", 3, linear=[{0, 1}, {0, 2}])
pointwise("addcdiv", 3, linear=[{0, 1}])
pointwise("clamp.Tensor", 3)
pointwise("masked_fill.Tensor", 3, linear=[{0, 2}])


@sharding_rule("aten.masked_fill.Scalar")
def _masked_fill(call: Call) -> Line:
    value = call["value"]
    return line("..., ... -> ...", linear=[{0}] if isinstance(value, (int, float)) and value == 0 else [])


# Backward formulas are linear in the incoming gradient, which comes first.
pointwise(
    """
    gelu_backward hardsigmoid_backward hardswish_backward hardshrink_backward hardtanh_backward leaky_relu_backward
    logit_backward mish_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward
    threshold_backward elu_backward native_dropout_backward
    """,
    2,
    linear=[{0}],
)
pointwise("log_sigmoid_backward", 3, linear=[{0}])
pointwise("_prelu_kernel_backward", 3, linear=[{0}], results=2)
