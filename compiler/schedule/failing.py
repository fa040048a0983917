"""Which calls can fail on a worker, whatever the shapes: those that look a value up (an index may be out of range),
check one (a probability), or belong to a user. Other calls fail only where memory runs out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import tensor_type

_SAFE = {
    ops.shard,
    ops.first_only,
    ops.axis_index,
    ops.to_varying,
    ops.from_varying,
    ops.fill_padding,
    ops.mean_shard,
    ops.arange_shard,
    ops.random,
    ops.sample,
    ops.find_anomaly,
    ops.number_anomaly,
    ops.constrain,
    ops.wait,
    ops.commit,
}
_DIVIDE = ("div", "floor_divide", "remainder", "fmod")
"""They raise where an integer is divided by zero."""
_CHECK = ("linalg_", "cholesky", "inverse", "lu_", "_assert", "binary_cross_entropy")
"""Beginnings of the names of ops that check their operands' values."""


def can_fail(call: fx.Node) -> bool:
    """Whether a call may raise for the values of its operands. A collective raises only where another call did."""
    always, for_integers = _can_fail(call.target)
    if always or not for_integers or not any(map(_is_integer, call.all_input_nodes)):
        return always
    return for_integers != "integer result" or _is_integer(call)


@cache
def _can_fail(target: Any) -> tuple[bool, str]:
    """Whether calls of an op may raise, whatever their operands; and whether they may where an operand is of integers:
    "" for never, "integer result" where the result is too, "always"."""
    if target is ops.kernel:  # it may look something up
        return False, "always"
    if isinstance(target, ops.MonarchOp):
        return not target.collective and target not in _SAFE, ""
    if not isinstance(target, torch._ops.OpOverload):
        return False, ""  # getitem
    if target.namespace not in ("aten", "prims"):
        return True, ""
    name = target.overloadpacket.__name__.rstrip("_")
    if name.startswith(_CHECK) or torch.Tag.nondeterministic_seeded in target.tags:
        return True, ""
    if any(result.alias_info is not None for result in target._schema.returns):
        return False, ""
    if torch.Tag.pointwise in target.tags or name in ("_to_copy", "clone"):
        return False, "integer result" if name in _DIVIDE else ""
    return False, "always"


def _is_integer(value: fx.Node) -> bool:
    type_ = value.meta.get("type")
    if type_ is None or isinstance(type_, tuple):
        return False
    dtype = tensor_type(value).dtype
    return dtype is not torch.bool and not dtype.is_floating_point and not dtype.is_complex


def before_the_commit(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls that can fail, also where another worker ends, and those whose results they read: a step makes these
    before it overwrites any state."""
    found: set[fx.Node] = set()
    stack = [call for call in calls if can_fail(call) or call.target is ops.wait or ops.is_collective(call.target)]
    while stack:
        call = stack.pop()
        if call.op == "call_function" and call not in found:
            found.add(call)
            stack.extend(call.all_input_nodes)
    return found
