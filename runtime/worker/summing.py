"""Sums of the bits of a tensor that arrives from another part of a plan: added up as it arrives, while it is in a
core's cache.

    %0 = recv 0, [16777216], f32                         its pieces are added up as they come
    %1 = aten.view.dtype(%0, int32)
    %2 = aten.sum.default(%1, dtype=int32)               gives that sum

Integers add up to the same sum in any order, so it is the one that the instruction would have made, in time that the
worker would have waited. It is what `monarch.sync` compares.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from monarch.compiler.plan import Plan, Slot
from monarch.runtime.shared.bits import ArrivingSum


def sums_of_arrivals(plan: Plan) -> Mapping[int, ArrivingSum]:
    """By the slots of both: each value that a plan for a CPU receives and whose sum of bits it makes, and that sum."""
    if plan.target != "cpu":
        return {}
    found: dict[int, ArrivingSum] = {}
    received: dict[int, torch.dtype] = {}
    bits: dict[int, int] = {}
    """Slots that hold the bits of a received value as i32, and its slot."""
    for each in plan.instructions:
        read = each.args[0].index if each.args and isinstance(each.args[0], Slot) else None
        if each.op == "recv":
            received[each.out] = each.args[2]
            if each.args[2] == torch.int32:
                bits[each.out] = each.out
        elif each.op == "aten.view.dtype" and read in received:
            if each.args[1] == torch.int32 and received[read].itemsize == 4:
                bits[each.out] = read
        elif each.op == "aten.sum.default" and read in bits and each.kwargs == {"dtype": torch.int32}:
            found[each.out] = found.setdefault(bits[read], ArrivingSum())
    return found
