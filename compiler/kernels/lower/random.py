"""Counter-based random numbers (`monarch.compiler.ops.random`): integer arithmetic on an element's global index, the
same bits as those of `local_ops.random`."""

from __future__ import annotations

import math

import torch
from torch import fx

from monarch.compiler.graph import args_of
from monarch.compiler.kernels.lower.coordinates import Affine, At, Unfusable
from monarch.compiler.kernels.lower.values import Lowering, compute_dtype, handler
from monarch.compiler.local_ops import GOLDEN, MIX1, MIX2

I64 = torch.int64


def _shift(lower: Lowering, x: int, bits: int) -> int:
    moved = lower.op("shr", x, lower.constant(bits, I64))
    return lower.op("and", moved, lower.constant((1 << (64 - bits)) - 1, I64))


def _mix(lower: Lowering, x: int) -> int:
    for bits, factor in ((30, MIX1), (27, MIX2)):
        x = lower.op("mul", lower.op("xor", x, _shift(lower, x, bits)), lower.constant(factor, I64))
    return lower.op("xor", x, _shift(lower, x, 31))


def _plus(lower: Lowering, x: int, number: int) -> int:
    return lower.op("add", x, lower.constant(number, I64))


@handler("random")
def _random(lower: Lowering, node: fx.Node, at: At) -> int:
    distribution, shape, _, seed, stream, global_shape, offsets = args_of(node)
    if distribution not in ("bits", "uniform"):
        raise Unfusable(f"{distribution} numbers, whose last bits would depend on what they are fused with")
    index = lower.zero
    for dim, coordinate in enumerate(at):
        if not isinstance(coordinate, Affine):
            raise Unfusable("random numbers at gathered coordinates")
        index = index + coordinate * math.prod(global_shape[dim + 1 :])
    number = lower.position(index)
    for dim, names in enumerate(offsets):
        # The worker's block along nested mesh dims, the first of them outermost.
        block = -1
        for name in names:
            place = lower.value(lower.places[name], ())
            size = lower.constant(lower.sizes[name], I64)
            block = place if block < 0 else lower.op("add", lower.op("mul", block, size), place)
        if block >= 0:
            step = lower.constant(shape[dim] * math.prod(global_shape[dim + 1 :]), I64)
            number = lower.op("add", number, lower.op("mul", block, step))
    given = lower.operand(seed, (), (), I64)
    key = _mix(lower, _plus(lower, _mix(lower, _plus(lower, given, GOLDEN)), stream * 2 + 1))
    spread = lower.op("mul", number, lower.constant(GOLDEN, I64))
    bits = _mix(lower, lower.op("add", spread, key))
    if distribution == "bits":
        return _shift(lower, bits, 2)
    dtype = compute_dtype(lower.tensors[node].dtype)
    return lower.op("mul", lower.cast(_shift(lower, bits, 40), dtype), lower.constant(2.0**-24, dtype))
