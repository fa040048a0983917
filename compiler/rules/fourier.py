"""Fourier transforms: the dims that are transformed stay whole, and all others shard."""

from __future__ import annotations

from monarch.compiler.rules.call import Call, dims_of
from monarch.compiler.rules.line import Line, factor_names, line
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import LINEAR, tensor_text


@sharding_rule("aten._fft_c2c aten._fft_r2c aten._fft_c2r")
def _transform(call: Call) -> Line:
    names = factor_names(len(call.result))
    dims = dims_of(call["dim"], len(names))
    text = tensor_text(["_" if dim in dims else name for dim, name in enumerate(names)])
    return line(f"{text} -> {text}", linear=LINEAR)


sharding_rule("aten.view_as_real", "... -> ... _", linear=LINEAR)
