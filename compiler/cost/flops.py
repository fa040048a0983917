"""How many floating-point operations an op does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

aten = torch.ops.aten


def matrix_flops(packet: object, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> float:
    """Floating-point operations of matrix products, convolutions and attention, a multiplication and an addition being
    two; 0 for every other op."""
    if packet in (aten.mm, aten.bmm, aten.matmul, aten.linear):
        return 2.0 * math.prod(results[0]) * operands[0][-1]
    if packet in (aten.addmm, aten.baddbmm):
        return 2.0 * math.prod(results[0]) * operands[1][-1]
    if packet is aten.tensordot:  # both operands have the dims that are summed over, and the result the others
        return 2.0 * math.sqrt(math.prod(results[0]) * math.prod(operands[0]) * math.prod(operands[1]))
    if packet is aten.convolution:
        return 2.0 * math.prod(results[0]) * math.prod(operands[1][1:])
    if packet is aten.convolution_backward:
        return 4.0 * math.prod(operands[0]) * math.prod(operands[2][1:])
    if is_attention(packet):
        query = next(shape for shape in operands if len(shape) == 4)
        return (10.0 if "backward" in str(packet) else 4.0) * math.prod(query) * query[-2]
    return 0.0


def is_attention(packet: object) -> bool:
    return "scaled_dot_product" in str(packet)
