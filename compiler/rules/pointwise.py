"""Pointwise ops: every operand broadcasts against the others, so any dim shards. They differ only in what is linear."""

from __future__ import annotations

from collections.abc import Iterable

from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, Shape, factor_names, line
from monarch.compiler.rules.register import sharding_rule


def pointwise(names: str, operands: int, linear: Iterable[Iterable[int]] = (), results: int = 1) -> None:
    """Register ops by name, ATen's unless a name begins with `prims.`."""
    text = f"{', '.join(['...'] * operands)} -> {', '.join(['...'] * results)}"
    for name in names.split():
        sharding_rule(name if name.startswith("prims.") else f"aten.{name}", text, linear=linear)


# One operand. A cast is linear up to the rounding of its result's dtype; `rule_for` drops what dtypes forbid.
pointwise(
    """
    alias clone conj conj_physical contiguous deg2rad detach lift_fresh lift_fresh_copy neg positive rad2deg _to_copy to
    prims.convert_element_type prims.device_put
    """,
    1,
    linear=[{0}],
)
pointwise(
    """
    abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh digamma elu erf erfc erfinv exp
    exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf
    leaky_relu lgamma log log10 log1p log2 logical_not logit mish nan_to_num polygamma reciprocal relu relu6 round
    rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_bessel_j0 special_entr
    special_airy_ai special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx special_i0e special_i1
    special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0 sqrt square tan tanh threshold trunc
    """,
    1,
)


def _log_sigmoid_buffer(shape: Shape | None) -> str:
    """The buffer that `log_sigmoid` keeps for its backward pass: empty on accelerators."""
    return "_" if shape == (0,) else "..."


@sharding_rule("aten.log_sigmoid_forward")
def _log_sigmoid(call: Call) -> Line:
    buffer = _log_sigmoid_buffer(call.results[1])
    # An empty buffer is the same on every worker, and so would be a factor's part of it.
    names = factor_names(len(call.shapes[0])) if buffer == "_" else []
    return line(f"... -> ..., {buffer}", kept=[(name, 1) for name in names])


@sharding_rule("aten.log_sigmoid_backward")
def _log_sigmoid_backward(call: Call) -> Line:
    return line(f"..., ..., {_log_sigmoid_buffer(call.shape('buffer'))} -> ...", linear=[{0}])


# The shape of the operand, not its values: zeros of the local shape are the local block of the zeros.
pointwise("zeros_like", 1, linear=[{0}])
pointwise("empty_like full_like ones_like", 1)

# Two operands.
pointwise("add sub rsub", 2, linear=[{0, 1}])
pointwise("mul", 2, linear=[{0}, {1}])
pointwise("complex", 2, linear=[{0, 1}])
pointwise("polar", 2, linear=[{0}])
pointwise("copy", 2, linear=[{1}, {0, 1}])
pointwise(
    """
    atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp_max clamp_min
    copysign eq floor_divide fmax fmin fmod gcd ge gt heaviside hypot lcm le logaddexp logaddexp2 logical_and logical_or
    igamma igammac logical_xor lt maximum minimum ne nextafter pow remainder special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
    special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_xlog1py special_zeta xlogy
    __and__ __or__ __xor__ __lshift__ __rshift__ _prelu_kernel
    """,
    2,
)


@sharding_rule("aten.div")
def _div(call: Call) -> Line:
    # Rounding a quotient is not linear.
    return line("..., ... -> ...", linear=[{0}] if call.get("rounding_mode") is None else [])


sharding_rule("aten.true_divide", "..., ... -> ...", linear=[{0}])

pointwise("frexp", 1, results=2)
pointwise("ldexp", 2)
sharding_rule("aten.fill", "..., [] -> ...")

# Three operands.
pointwise("where", 3, linear=[{1, 2}])
pointwise("lerp", 3, linear=[{0, 1}])
pointwise("addcmul", 3, linear=[{0, 1}, {0, 2}])
pointwise("addcdiv", 3, linear=[{0, 1}])
pointwise("clamp", 3)
pointwise("masked_fill", 3, linear=[{0, 2}])

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
pointwise("_standard_gamma_grad", 2)
pointwise("_dirichlet_grad", 3)
pointwise("rrelu_with_noise_backward", 3, linear=[{0}])
pointwise("_prelu_kernel_backward", 3, linear=[{0}], results=2)
