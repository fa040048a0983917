"""The callable of each instruction's op: the cheapest one with the op's meaning.

An ATen overload can be called in several ways. `torch.ops` parses its arguments by schema, which takes about half a
microsecond longer than the functions and methods that Python users call; for the ops in `DIRECT` those take the same
positional arguments and mean the same (tested op by op against `torch.ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch.compiler.plan.arena import out_form
from monarch.runtime.shared.checking import overload

_FUNCTIONS = """
    abs.default add.Tensor addmm.default bmm.default cat.default clone.default cos.default detach.default div.Tensor
    embedding.default eq.Scalar eq.Tensor erf.default exp.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar
    le.Tensor log.default logical_and.default logical_not.default lt.Scalar lt.Tensor maximum.default minimum.default
    mm.default mul.Tensor ne.Scalar ne.Tensor neg.default permute.default pow.Tensor_Scalar reciprocal.default
    relu.default rsqrt.default select.int sigmoid.default sin.default sqrt.default squeeze.dim sub.Tensor
    t.default tanh.default transpose.int unsqueeze.default where.self
""".split()
_METHODS = "expand.default view.default copy_.default add_.Tensor mul_.Tensor addcmul_.default addcdiv_.default".split()

DIRECT: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}": getattr(torch._C._VariableFunctions, name.split(".")[0]) for name in _FUNCTIONS},
    **{f"aten.{name}": getattr(torch._C.TensorBase, name.split(".")[0]) for name in _METHODS},
}


def resolve_into(op: str) -> tuple[Callable[..., Any], str]:
    """The callable that writes an op's result into a given tensor, and the argument that takes this tensor; for ops of
    which `compiler.plan.arena.out_form` knows one."""
    form = out_form(op)
    assert form is not None, op
    written, argument = form
    return DIRECT.get(op) or resolve(written), argument


def resolve(op: str, direct: bool = True) -> Callable[..., Any]:
    """The callable for "getitem" or an ATen (or other registered) overload, as in "aten.mm.default"; with `direct` the
    cheaper one of `DIRECT`, if there is one. Raises PlanError."""
    return DIRECT[op] if direct and op in DIRECT else overload(op)
