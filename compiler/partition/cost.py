"""The cost of an alternative, on the machine `BALANCED`: the unit is the time in which a worker sends one byte.

Only ratios matter. They and the weights below are chosen so that the user's layouts are followed first: compute that is
done once on every worker although it could be divided costs much, state (parameters) that is gathered costs little, for
it can be fetched ahead, while a sharded activation stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from monarch.compiler.cost.flops import matrix_flops
from monarch.compiler.cost.machine import BALANCED
from monarch.compiler.ops.schema import is_view
from monarch.compiler.symbols import examples
from monarch.compiler.types import VARYING, Placement, is_partial

STATE_GATHER = 0.01
"""Parameters are gathered ahead of their use, while nothing waits for them."""
GATHER = 8.0
"""Anything else that is gathered is waited for, and what follows is then done by every worker: gradients are
reduced, not recomputed from gathered activations, also where that would move a little less."""
SLICE_PER_BYTE = 1e-3

FORBIDDEN = math.inf


def reshard_cost(source: Placement, target: Placement, nbytes: float, k: int) -> float:
    """Bytes that each worker sends to bring a value of `nbytes` (whole along this mesh dim) from `source` to
    `target`."""
    if source == target:
        return 0.0
    moved = nbytes * (k - 1) / k
    if source == VARYING:
        return FORBIDDEN
    if target == VARYING:  # the same on every worker, which each takes as its own
        return reshard_cost(source, None, nbytes, k)
    if source is None:
        # Blocks are cut, and summands made, where the value already is.
        return SLICE_PER_BYTE * nbytes if target in ("sum",) or isinstance(target, int) else FORBIDDEN
    if is_partial(source):
        if target is None:
            return 2 * moved + BALANCED.link.latency
        if isinstance(target, int):
            return moved + BALANCED.link.latency
        return FORBIDDEN
    if target is None:
        return GATHER * moved + BALANCED.link.latency
    if isinstance(target, int):
        return moved / k + BALANCED.link.latency
    # Sharded to partial: gathered, then kept on the first worker only.
    return GATHER * moved + BALANCED.link.latency + SLICE_PER_BYTE * nbytes if target == "sum" else FORBIDDEN


def compute_cost(node: fx.Node, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> float:
    """One worker's cost of the whole op, from its local shapes."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if is_view(node.target):
        return 0.0
    operands, results = examples(list(operands)), examples(list(results))
    flops = matrix_flops(packet, operands, results)
    touched = 4.0 * (sum(map(math.prod, operands)) + sum(map(math.prod, results)))
    return flops / BALANCED.rate("f32") + touched / BALANCED.memory
