"""What an op needs in the padding of its operands, where a factor of its rule has a size that the mesh does not divide.

A factor that every result has leaves padding in its place: the rule says that results depend on their own blocks alone,
whatever their size. So what the padding holds makes no difference, unless the op fails on it (an index out of range, an
integer divided by zero). A factor that a result lacks is reduced: the padding must add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from monarch.compiler.ops import MonarchOp
from monarch.compiler.ops.record import enter, find
from monarch.compiler.ops.schema import is_view
from monarch.compiler.rules.call import Call, dim_of, op_name
from monarch.compiler.rules.rule import Dims, Rule

Fill = float | None
"""What padding has to hold; None where that makes no difference. ±inf stands for a dtype's lowest and highest."""

_LOWEST, _HIGHEST = -math.inf, math.inf

# Sums of products, and what gives 0 for rows of zeros.
enter(
    """
    aten.sum aten.mean aten.nansum aten.count_nonzero aten.any aten.mm aten.bmm aten.dot aten.vdot aten.mv aten.addmm
    aten.baddbmm aten.addbmm aten.addmv aten.linear aten.matmul aten.tensordot
    aten.convolution aten.convolution_backward aten.embedding aten.embedding_dense_backward aten.gather
    aten.index_add aten.scatter_add aten.native_layer_norm_backward aten._fused_rms_norm_backward
    aten.native_group_norm_backward aten.mse_loss aten.l1_loss aten.smooth_l1_loss aten.huber_loss
    """.split(),
    padding=0.0,
)
enter(["aten.prod", "aten.all"], padding=1.0)
enter(["aten.amax", "aten.max.default"], padding=_LOWEST)
enter(["aten.amin", "aten.min.default"], padding=_HIGHEST)

_ALONG: Mapping[str, tuple[Fill, ...]] = {
    "_softmax": (_LOWEST,),
    "_log_softmax": (_LOWEST,),
    "_safe_softmax": (_LOWEST,),
    "softmax": (_LOWEST,),
    "log_softmax": (_LOWEST,),
    "_softmax_backward_data": (0.0, 0.0),
    "_log_softmax_backward_data": (0.0, None),
}
"""Ops over a whole `dim` on whose padding they can run: what each operand's has to hold."""

_LOSSES = ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")
_CHECK = (
    *"linalg_ _linalg_ cholesky inverse lu_ geqrf ormqr _assert _cdist".split(),
    *"multi_margin_loss multilabel_margin_loss take put fractional_max_pool".split(),
)
"""Beginnings of the names of ops that fail on some values."""
_DIVIDE = ("div", "floor_divide", "remainder", "fmod", "true_divide")
_GROUPS = (
    *("convolution", "convolution_backward", "native_group_norm", "native_group_norm_backward"),
    *("channel_shuffle", "native_channel_shuffle"),
)
UNREAD = frozenset(
    getattr(torch.ops.aten, name)
    for name in """
    new_empty new_empty_strided new_full new_ones new_zeros zeros_like ones_like full_like empty_like
    """.split()
)
"""Ops that read their operand's dtype and shape, and none of its values."""

LOOKUPS: Mapping[str, tuple[str, str]] = {
    "embedding": ("weight", "indices"),
    "gather": ("self", "index"),
    "scatter": ("self", "index"),
    "nll_loss_forward": ("self", "target"),
    "nll_loss2d_forward": ("self", "target"),
}
"""Ops that look up along a dim of the first argument by what the second one holds."""

_ALONG_FACTOR = "along"


@dataclass(frozen=True)
class Needs:
    """What one call needs of padding.

    `rule`   its rule, in which a dim of which it needs the whole is the factor `along` where it may be padded
    `fills`  for each factor that may be padded, what each operand's padding along it has to hold
    """

    rule: Rule
    fills: Mapping[str, tuple[Fill, ...]]


def needs_of(call: Call, rule: Rule) -> Needs:
    """What a call with this rule, for sizes without padding, needs of padding."""
    name = _packet(call)
    along: tuple[Fill, ...] = ()
    if name in _ALONG:
        along = _ALONG[name]
        rule = _with_factor(rule, call, dim_of(call.get("dim", -1), len(call.shapes[0])))
    elif name in _LOSSES:
        at = min(1, len(call.shapes[call.position("self") or 0]) - 1)
        along = (None,) * len(rule.operands)
        rule = _with_factor(rule, call, at, call.position("self"), call.position("weight"))
    fills: dict[str, tuple[Fill, ...]] = {}
    for factor in rule.sizes:
        if factor == _ALONG_FACTOR:
            fills[factor] = along
        elif factor not in rule.whole and rule.leads(factor):
            found = _fills(call, rule, factor, name)
            if found is not None:
                fills[factor] = found
    return Needs(rule, fills)


def _fills(call: Call, rule: Rule, factor: str, name: str) -> tuple[Fill, ...] | None:
    count = len(rule.operands)
    if name.startswith(_CHECK) or (name in _GROUPS and factor == "g"):
        return None
    of_torch = isinstance(call.target, MonarchOp) or getattr(call.target, "namespace", "") in ("aten", "prims")
    if name in _LOSSES:  # a target that is ignored adds nothing, to the number of targets neither
        target = call.position("target")
        return tuple(call["ignore_index"] if at == target else None for at in range(count))
    if is_reduced(rule, factor):
        fill = _reduced(call, rule, factor, name) if factor in rule.reductions and of_torch else None
        return None if fill is None else (fill,) * count
    if not of_torch or name == "binary_cross_entropy" or name == "binary_cross_entropy_backward":
        return (0.0,) * count
    dtypes = [operand.meta["type"].dtype for operand in call.operands]
    integers = [_is_integer(dtype) for dtype in dtypes]
    if name in _DIVIDE and all(integers):
        return (1.0,) * count
    tags = getattr(call.target, "tags", ())
    if torch.Tag.pointwise in tags or is_view(call.target) or isinstance(call.target, MonarchOp):
        return (None,) * count
    return tuple(0.0 if integer else None for integer in integers)  # a valid index


def _reduced(call: Call, rule: Rule, factor: str, name: str) -> Fill:
    """What adds nothing to this call's reduction of a factor; None where that is not known."""
    if name in ("norm", "linalg_vector_norm"):
        order: Any = call.get("ord", call.get("p", 2))
        return {0: 0.0, 1: 0.0, math.inf: 0.0, -math.inf: _HIGHEST}.get(2 if order is None else order)
    if name in ("index_put", "_unsafe_index_put"):  # a value for several places is added at those in the padding too
        each_its_own = any(factor in dim for dim in rule.operands[-1])
        return 0.0 if call.get("accumulate") and each_its_own else None
    if name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "native_batch_norm_backward"):
        return 0.0
    return find(call.target, "padding")


def is_reduced(rule: Rule, factor: str) -> bool:
    """Whether some result lacks the factor and depends on it."""
    return any(
        result is not None and (factor, index) not in rule.kept and not any(factor in dim for dim in result)
        for index, result in enumerate(rule.results)
    )


def _with_factor(rule: Rule, call: Call, at: int, *operands: int | None) -> Rule:
    """The rule with dim `at` of tensors of the first operand's rank, which it has as a whole dim, named `along`; of a
    loss's weight, which has the classes alone, its only dim."""
    chosen = set(range(len(rule.operands))) if not operands else {each for each in operands if each is not None}
    size = call.shapes[operands[0] or 0][at] if operands else call.shapes[0][at]

    def named(dims: Dims, place: int) -> Dims:
        return tuple((_ALONG_FACTOR,) if dim == place else each for dim, each in enumerate(dims))

    ndim = len(call.shapes[(operands[0] or 0) if operands else 0])
    changed = tuple(
        named(dims, at if len(dims) == ndim else 0) if index in chosen else dims
        for index, dims in enumerate(rule.operands)
    )
    results = tuple(
        named(dims, at) if dims is not None and shape is not None and len(dims) == ndim and shape[at] == size else dims
        for dims, shape in zip(rule.results, call.results, strict=True)
    )
    return replace(rule, operands=changed, results=results, sizes={**rule.sizes, _ALONG_FACTOR: size})


def _packet(call: Call) -> str:
    packet = getattr(call.target, "overloadpacket", call.target)
    return op_name(packet).rpartition(".")[2]


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
