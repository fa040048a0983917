"""What an alternative costs. The unit is one byte sent by one worker.

Only ratios matter, and they are chosen so that what the user's layouts say is followed first: compute that is done
once on every worker although it could be divided is dear, state (parameters) that is gathered is cheap, for it can
be fetched ahead, while a sharded activation stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from monarch.compiler.ops.schema import is_view
from monarch.compiler.types import VARYING, Placement, is_partial

FLOPS_PER_BYTE = 4.0
"""A CPU worker does some 10 to 50 floating-point operations in the time that a byte takes to another worker, a GPU
hundreds; 4 also keeps tensor parallelism in the narrowest models from being traded for gathered weights."""

MEMORY_PER_BYTE = 0.1
"""Reading or writing a byte of local memory against sending one."""

PER_COLLECTIVE = 64.0
STATE_GATHER = 0.01
"""Parameters are gathered ahead of their use, while nothing waits for them."""
GATHER = 8.0
"""Anything else that is gathered is waited for, and what follows is then done by every worker: gradients are
reduced, not recomputed from gathered activations, also where that would move a little less."""
SLICE_PER_BYTE = 1e-3

FORBIDDEN = math.inf

aten = torch.ops.aten


def reshard_cost(source: Placement, target: Placement, nbytes: float, k: int) -> float:
    """Bytes that each worker sends to bring a value of `nbytes` (whole along this mesh dim) from `source` to
    `target`."""
    if source == target:
        return 0.0
    moved = nbytes * (k - 1) / k
    if VARYING in (source, target):
        return FORBIDDEN
    if source is None:
        # Blocks are cut, and summands made, where the value already is.
        return SLICE_PER_BYTE * nbytes if target in ("sum",) or isinstance(target, int) else FORBIDDEN
    if is_partial(source):
        if target is None:
            return 2 * moved + PER_COLLECTIVE
        if isinstance(target, int):
            return moved + PER_COLLECTIVE
        return FORBIDDEN
    if target is None:
        return GATHER * moved + PER_COLLECTIVE
    if isinstance(target, int):
        return moved / k + PER_COLLECTIVE
    # Sharded to partial: gathered, then kept on the first worker only.
    return GATHER * moved + PER_COLLECTIVE + SLICE_PER_BYTE * nbytes if target == "sum" else FORBIDDEN


def compute_cost(node: fx.Node, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> float:
    """What one worker spends on the whole op, from its local shapes."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if is_view(node.target):
        return 0.0
    flops = matrix_flops(packet, operands, results)
    touched = 4.0 * (sum(map(math.prod, operands)) + sum(map(math.prod, results)))
    return flops / FLOPS_PER_BYTE + touched * MEMORY_PER_BYTE


def matrix_flops(packet: object, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> float:
    """Floating-point operations of matrix products, convolutions and attention, a multiplication and an addition being
    two; 0 for every other op."""
    if packet in (aten.mm, aten.bmm):
        return 2.0 * math.prod(results[0]) * operands[0][-1]
    if packet in (aten.addmm, aten.baddbmm):
        return 2.0 * math.prod(results[0]) * operands[1][-1]
    if packet is aten.convolution:
        return 2.0 * math.prod(results[0]) * math.prod(operands[1][1:])
    if packet is aten.convolution_backward:
        return 4.0 * math.prod(operands[0]) * math.prod(operands[2][1:])
    name = str(packet)
    if "scaled_dot_product" in name:
        query = next(shape for shape in operands if len(shape) == 4)
        return (10.0 if "backward" in name else 4.0) * math.prod(query) * query[-2]
    return 0.0
