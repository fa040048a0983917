"""Samples of the pointwise ops: each overload, with broadcasting where it can be."""

from __future__ import annotations

from typing import Any

import torch

from tests.compiler.rules.dense import Sample, call
from tests.compiler.rules.values import below, flags, real, unit

aten, prims = torch.ops.aten, torch.ops.prims

UNARY = """
    abs acos angle asin asinh atan atanh ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 fix floor
    frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf leaky_relu lgamma log
    log10 log1p log2 logical_not logit mish nan_to_num neg positive rad2deg reciprocal relu relu6 round rsqrt selu sgn
    sigmoid sign signbit silu sin sinc sinh softplus softshrink special_bessel_j0 special_entr special_erfcx special_i0e
    special_i1 special_i1e special_log_ndtr special_ndtri sqrt square tan tanh trunc
    special_airy_ai special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    absolute alias clone contiguous detach lift_fresh lift_fresh_copy ones_like zeros_like conj
""".split()

BINARY = """
    atan2 copysign floor_divide fmax fmin fmod heaviside hypot logaddexp logaddexp2 logical_and logical_or logical_xor
    igamma igammac maximum minimum nextafter special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_xlog1py special_zeta
    true_divide
""".split()

OVERLOADS = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    pow.Tensor_Tensor remainder.Tensor xlogy.Tensor clamp_min.Tensor clamp_max.Tensor rsub.Tensor
""".split()

INTEGER = """
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    gcd.default lcm.default __and__.Tensor __or__.Tensor __xor__.Tensor __lshift__.Tensor __rshift__.Tensor
""".split()

SCALAR = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar eq.Scalar ne.Scalar
    lt.Scalar le.Scalar gt.Scalar ge.Scalar pow.Tensor_Scalar remainder.Scalar fmod.Scalar clamp_min.default
    clamp_max.default rsub.Scalar floor_divide.Scalar xlogy.Scalar_Other threshold.default special_zeta.other_scalar
""".split()

GRADIENT = """
    hardswish_backward hardsigmoid_backward sigmoid_backward silu_backward tanh_backward gelu_backward mish_backward
""".split()


def overload(name: str) -> Any:
    packet, _, chosen = name.partition(".")
    return getattr(getattr(aten, packet), chosen or "default")


def pointwise_samples() -> list[Sample]:
    samples = [call(_one(name), unit(4, 6)) for name in UNARY]
    for name in [*BINARY, *OVERLOADS]:
        op = _one(name)
        samples += [call(op, unit(4, 6), unit(4, 6)), call(op, unit(4, 1), unit(6)), call(op, unit(), unit(2, 4))]
    samples += [call(overload(name), below(4, 4, 6) + 1, below(4, 4, 6) + 1) for name in INTEGER]
    samples += [call(overload(name), unit(4, 6), *([2, 3] if "threshold" in name else [2])) for name in SCALAR]
    samples += [call(overload(name), real(4, 6), unit(4, 6)) for name in GRADIENT]
    x, y, z = real(4, 6), unit(4, 6), real(4, 6)
    samples += [
        call(aten.frexp.Tensor, x),
        call(aten.ldexp.Tensor, x, below(4, 6)),
        call(aten.fill.Scalar, x, 2.0),
        call(aten.fill.Tensor, x, real()),
        call(aten.rrelu_with_noise_backward.default, x, z, y, 0.1, 0.3, True, False),
        call(aten.add.Tensor, x, y, alpha=2),
        call(aten.add.Tensor, x, real(1, 6), alpha=2),
        call(aten.add.Tensor, x, 0),
        call(aten.add.Tensor, flags(4, 6), flags(4, 6)),
        call(aten.add.Tensor, below(9, 4, 6), below(9, 4, 6)),
        call(aten.mul.Tensor, flags(4, 6), x),
        call(aten.mul.Tensor, below(9, 4, 6), below(9, 6)),
        call(aten.sub.Tensor, x, y, alpha=3),
        call(aten.div.Tensor_mode, x, y, rounding_mode="floor"),
        call(aten.div.Tensor_mode, x, y, rounding_mode=None),
        call(aten.div.Tensor, below(9, 4, 6), below(9, 4, 6) + 1),
        call(aten.pow.Scalar, 2.0, x),
        call(aten.bitwise_not.default, flags(4, 6)),
        call(aten.bitwise_and.Tensor, flags(4, 6), flags(6)),
        call(aten.clamp.default, x, -0.5, 0.5),
        call(aten.clamp.Tensor, x, real(6) - 2, real(4, 1) + 2),
        call(aten.clamp.Tensor, x, None, real(4, 1)),
        call(aten.clamp.Tensor, x, max=real(4, 1)),
        call(aten.polygamma.default, 1, y),
        call(aten.acosh.default, y + 1),
        call(aten.log_sigmoid_forward.default, x),
        call(aten.log_sigmoid_backward.default, x, z, torch.exp(-z.abs())),
        call(aten.gelu.default, x, approximate="tanh"),
        call(aten.gelu_backward.default, x, y, approximate="tanh"),
        call(aten.threshold_backward.default, x, z, 0),
        call(aten.hardtanh_backward.default, x, z, -1, 1),
        call(aten.leaky_relu_backward.default, x, z, 0.1, False),
        call(aten.elu_backward.default, x, 1, 1, 1, False, z),
        call(aten.logit_backward.default, x, y),
        call(aten.softplus_backward.default, x, z, 1, 20),
        call(aten.softshrink_backward.default, x, z, 0.5),
        call(aten.hardshrink_backward.default, x, z, 0.5),
        call(aten.native_dropout_backward.default, x, flags(4, 6), 2.0),
        call(aten.native_dropout.default, x, 0.0, True),
        call(aten.native_dropout.default, x, 0.5, False),
        call(aten.where.self, flags(4, 6), x, z),
        call(aten.where.self, flags(4, 1), x, z),
        call(aten.where.self, flags(6), real(4, 1), real()),
        call(aten.where.ScalarOther, flags(4, 6), x, 0.0),
        call(aten.where.ScalarOther, flags(4, 6), x, 1.0),
        call(aten.where.ScalarSelf, flags(4, 6), 0, x),
        call(aten.where.Scalar, flags(4, 6), 0.0, 1.0),
        call(aten.lerp.Scalar, x, z, 0.3),
        call(aten.lerp.Tensor, x, z, unit(6)),
        call(aten.addcmul.default, x, y, z, value=2),
        call(aten.addcmul.default, real(6), y, real(4, 1), value=2),
        call(aten.addcdiv.default, x, z, y, value=2),
        call(aten.masked_fill.Scalar, x, flags(4, 6), 0),
        call(aten.masked_fill.Scalar, x, flags(6), 1.5),
        call(aten.masked_fill.Tensor, x, flags(4, 6), torch.tensor(1.5, dtype=torch.float64)),
        call(aten._to_copy.default, x, dtype=torch.float32),
        call(aten._to_copy.default, x, dtype=torch.int64),
        call(aten._to_copy.default, below(9, 4, 6), dtype=torch.float64),
        call(aten._to_copy.default, flags(4, 6), dtype=torch.float64),
        call(aten._to_copy.default, below(9, 4, 6).to(torch.bfloat16), dtype=torch.float32),
        call(aten.to.dtype, x, torch.float32),
        call(prims.convert_element_type.default, x, torch.float32),
        call(prims.device_put.default, x, torch.device("cpu")),
        call(aten.copy.default, x, z),
        call(aten.copy.default, x, real(6)),
        call(aten.full_like.default, x, 2.0),
        call(aten.empty_like.default, x, shape_only=True),
        call(aten._prelu_kernel.default, x, unit(4, 6)),
        call(aten._prelu_kernel_backward.default, x, z, unit(4, 6)),
        call(aten.view.dtype, x, torch.int64),
        call(aten.view.dtype, x, torch.int32),
        call(aten.view_copy.dtype, x, torch.int32),
    ]
    return samples


def _one(name: str) -> Any:
    """The overload of a pointwise op that takes just tensors."""
    packet, _, chosen = name.partition(".")
    found = getattr(aten, packet)
    return getattr(found, chosen or ("Tensor" if "Tensor" in found.overloads() else "default"))
