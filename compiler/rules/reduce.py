"""Reductions over dims, and ops that need a whole dim: softmax, cumulative sums, sorting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from monarch.compiler import ops
from monarch.compiler.rules.call import Call, dim_of, dims_of
from monarch.compiler.rules.line import Line, factor_names, line
from monarch.compiler.rules.localize import LocalCall, Localized, localizer
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text


def reduction(
    call: Call, dims: Sequence[int], keepdim: bool, *, reduce: str | None, linear: Iterable[Iterable[int]] = ()
) -> Line:
    """Reduce `dims` of operand 0; they stay whole where `reduce` is None."""
    names = factor_names(len(call.shapes[0]))
    gone = [name for dim, name in enumerate(names) if dim in dims]
    result = tensor_text(["_" if name in gone else name for name in names if keepdim or name not in gone])
    return line(
        f"{tensor_text(names)} -> {', '.join([result] * len(call.results))}",
        whole="" if reduce else " ".join(gone),
        reduce=reduce or "sum",
        linear=linear,
    )


def _dims(call: Call) -> list[int]:
    return dims_of(call.get("dim"), len(call.shapes[0]))


def _reduce_by(names: str, reduce: str | None, linear: Iterable[Iterable[int]] = ()) -> None:
    @sharding_rule(names)
    def rule(call: Call) -> Line:
        return reduction(call, _dims(call), call.get("keepdim", False), reduce=reduce, linear=linear)


_reduce_by("aten.sum aten.mean", "sum", linear=[{0}])
_reduce_by("aten.nansum aten.count_nonzero", "sum")
_reduce_by("aten.prod", "prod")
_reduce_by("aten.amax aten.max.default aten.any", "max")
_reduce_by("aten.amin aten.min.default aten.all", "min")
# A mean of squares less a squared mean loses digits, and an index among blocks is no reduction: whole.
_reduce_by(
    """
    aten.var aten.std aten.var_mean aten.std_mean aten.logsumexp aten.argmax aten.argmin aten.aminmax aten.median
    aten.nanmedian aten.max.dim aten.min.dim aten.median.dim aten.nanmedian.dim aten.mode aten.kthvalue
    """,
    None,
)


@localizer("aten.mean")
def _local_mean(call: LocalCall) -> Localized:
    """A worker's share of the mean is what its own elements add to it, so that the shares sum up to the mean."""
    if call.strategy.results[0] != "sum":
        return call.unchanged()
    shape = call.shapes[0]
    dims = _dims(call)
    count = math.prod(shape[dim] for dim in dims) * call.k
    return ops.mean_shard, (call.node.args[0], dims, call.get("keepdim", False), count, call.get("dtype")), {}


@sharding_rule("mean_shard")
def _mean_shard(call: Call) -> Line:
    return reduction(call, call["dims"], call["keepdim"], reduce="sum", linear=[{0}])


@sharding_rule("aten.norm aten.linalg_vector_norm")
def _norm(call: Call) -> Line:
    order: Any = call.get("ord", call.get("p", 2))
    reduce = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}.get(2 if order is None else order)
    return reduction(call, _dims(call), call.get("keepdim", False), reduce=reduce)


def _whole_dim(names: str, operands: int = 1, linear: Iterable[Iterable[int]] = ()) -> None:
    """Ops that keep their shape along all dims but `dim`, which they need whole."""

    @sharding_rule(names)
    def rule(call: Call) -> Line:
        ndim = len(call.shapes[0])
        dim = dim_of(call.get("dim", -1), ndim)
        text = tensor_text(["_" if at == dim else name for at, name in enumerate(factor_names(ndim))])
        return line(f"{', '.join([text] * operands)} -> {', '.join([text] * len(call.results))}", linear=linear)


_whole_dim("aten._softmax aten._log_softmax aten.softmax aten.log_softmax aten._safe_softmax")
_whole_dim("aten._softmax_backward_data aten._log_softmax_backward_data", operands=2, linear=[{0}])
_whole_dim("aten.cumsum", linear=[{0}])
_whole_dim(
    """
    aten.cumprod aten.logcumsumexp aten.cummax aten.cummin aten.sort aten.argsort aten.topk
    """
)


def _gated(call: Call, operands: int) -> Line:
    """Halves of one dim, which stays whole, go with each other."""
    ndim = len(call.shape("self") or ())
    dim = dim_of(call.get("dim", -1), ndim)
    text = tensor_text(["_" if at == dim else each for at, each in enumerate(factor_names(ndim))])
    return line(f"{', '.join([text] * operands)} -> {text}", linear=[{0}] if operands == 2 else [])


sharding_rule("aten.glu")(lambda call: _gated(call, 1))
sharding_rule("aten.glu_backward")(lambda call: _gated(call, 2))
