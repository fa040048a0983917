"""Where in a worker's arena results lie: what can be put there, and whether a plan does that right.

A worker has one arena, as large as the largest of its plans needs. What is in it is worth nothing between two steps: a
result lies there only from the instruction that makes it until the last that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.names import find_op
from monarch.compiler.ops import OPS
from monarch.compiler.ops.record import of_packet, record
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.plan.plan import ArenaRange, Instruction, Plan, Slot

ALIGN = 64
"""Every region starts at a multiple of so many bytes, as torch's own buffers do."""

for _op in """
    aten.mm.default aten.bmm.default aten.matmul.default aten.addmm.default aten.baddbmm.default aten.add.Tensor
    aten.sub.Tensor
    aten.mul.Tensor aten.div.Tensor aten.exp.default aten.tanh.default aten.sigmoid.default aten.gelu.default
    aten.silu.default aten.cat.default aten.mean.dim
    """.split():
    record(_op).out = (f"{_op.rpartition('.')[0]}.out", "out")
for _op in ("aten.gelu_backward", "aten.silu_backward"):
    record(f"{_op}.default").out = (f"{_op}.grad_input", "grad_input")
record("aten.sum.dim_IntList").out = ("aten.sum.IntList_out", "out")


def out_form(op: str) -> tuple[str, str] | None:
    """For an ATen op that can be told where to write its result: the overload that takes this, and as which argument;
    None for others. What they write is contiguous, and has the same bits."""
    return of_packet(op, "out")


PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "bmm", "matmul", "addmm", "baddbmm"))
"""Those of them whose result is contiguous whatever their operands are."""


def region_bytes(region: ArenaRange) -> int:
    return math.prod(region.shape) * region.dtype.itemsize


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a buffer of these sizes is contiguous; the stride of a dim of one element means nothing."""
    apart = zip(shape, strides, row_major(shape), strict=True)
    return all(size == 1 or given == dense for size, given, dense in apart)


def wrong_region(plan: Plan, instruction: Instruction) -> str | None:
    """What is wrong with an instruction's regions, if anything is."""
    regions = instruction.regions
    if not regions:
        return None
    if instruction.op == "kernel" and len(instruction.args) == 3:
        kernel: Kernel = parse_kernel(instruction.args[1])
        over = instruction.args[2]
        if len(regions) != len(kernel.outputs):
            return f"its kernel gives {len(kernel.outputs)} tensors, and it has regions for {len(regions)}"
        for number, region in enumerate(regions):
            buffer = kernel.outputs[number]
            if region is None:
                continue
            if over[number] != -1:
                return f"its result {number} lies over a tensor, and in the arena"
            if (region.dtype, tuple(region.shape)) != (buffer.dtype, tuple(buffer.shape)):
                return f"its result {number} is of another type than its region"
            if not is_row_major(buffer.shape, buffer.strides):
                return f"its result {number} is not contiguous, and lies in the arena"
    elif out_form(instruction.op) is None or len(regions) != 1 or regions[0] is None:
        return "it cannot write into the arena"
    for region in regions:
        if region is None:
            continue
        size = region_bytes(region)
        if region.offset % ALIGN or not size or region.offset + size > plan.own_arena:
            return f"{size} bytes at {region.offset} are no region of an arena of {plan.own_arena} bytes"
    return None


def overlapping(plan: Plan) -> tuple[int, int] | None:
    """Two instructions of which the later one writes into the arena where a result of the earlier lies that is still to
    be read, or given as a result of the plan: the plan computes nonsense then. None where there are none."""
    at: dict[int, _Regions] = {}
    for number, instruction in enumerate(plan.instructions):
        if instruction.op == "commit":
            continue
        own = [_part(number, region) for region in instruction.regions]
        living = [part for value in at.values() for part in value.parts]
        for index, (_, start, end) in enumerate(own):
            for other, low, high in (*living, *own[:index]):
                if start < high and low < end:
                    return other, number
        at[instruction.out] = _result(instruction, own, at)
        for slot in instruction.free:
            at.pop(slot, None)
    for spec in plan.outputs:
        if spec.slot in at and (parts := [part for part in at[spec.slot].parts if part[1] < part[2]]):
            return parts[0][0], len(plan.instructions)
    return None


_Part = tuple[int, int, int]
"""An instruction that writes into the arena, and where: the first byte, and that behind the last. No bytes for a result
that is not there."""


@dataclass(frozen=True)
class _Regions:
    """The regions in which the value of a slot may be; for a kernel's results, which are one value, those of each alone
    too."""

    parts: list[_Part]
    elements: list[list[_Part]] | None = None


def _part(number: int, region: ArenaRange | None) -> _Part:
    return (number, 0, 0) if region is None else (number, region.offset, region.offset + region_bytes(region))


def _result(instruction: Instruction, own: list[_Part], at: Mapping[int, _Regions]) -> _Regions:
    if instruction.op == "kernel" and len(instruction.args) == 3:
        tensors, _, over = instruction.args
        homes = own or [(0, 0, 0)] * len(over)
        operands = [at.get(tensors[operand].index) if operand >= 0 else None for operand in over]
        each = [operand.parts if operand else [home] for operand, home in zip(operands, homes, strict=True)]
        return _Regions([part for parts in each for part in parts], each)
    if instruction.op == "getitem" and len(instruction.args) == 2:
        value, index = instruction.args
        given = at.get(value.index) if isinstance(value, Slot) else None
        elements = None if given is None else given.elements
        if elements is not None and type(index) is int and 0 <= index < len(elements):
            return _Regions(elements[index])
    return _Regions([*own, *(part for slot in _may_alias(instruction) if slot in at for part in at[slot].parts)])


def _may_alias(instruction: Instruction) -> Iterator[int]:
    """The slots whose memory an instruction's result may share."""
    shared = _shared(instruction.op)
    if shared is None:
        yield from slots_in([instruction.args, [*instruction.kwargs.values()]])
    else:
        yield from slots_in([argument for at, argument in enumerate(instruction.args) if at in shared])


def slots_in(argument: object) -> Iterator[int]:
    """The slots that an argument, or a list of them, reads."""
    if isinstance(argument, Slot):
        yield argument.index
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from slots_in(each)


@cache
def _shared(op: str) -> frozenset[int] | None:
    """Which of an op's arguments its result may share memory with, by position; None for any."""
    if op in OPS:
        return frozenset([0] if op in ("shard", "first_only", "to_varying", "from_varying", "wait") else ())
    return memory_of(find_op(op)).shares if op.startswith(("aten.", "prims.")) else None
