"""The places of a step's values in a worker's arena: which values, how long, and at which offset.

A value may be there where only the step reads it: it is neither a result nor shares a result's buffer, and its readers
are ops whose results are known not to share their operands' memory unnoticed. Values of less than a page stay with the
allocator, which has them at hand, and so do those that their op makes itself (attention, collectives).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.work import local_bytes
from monarch.compiler.graph import args_of, tensor_type
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan.arena import ALIGN, PRODUCTS, is_row_major, out_form
from monarch.compiler.plan.plan import ArenaRange, Instruction
from monarch.compiler.schedule.schedule import Schedule
from monarch.compiler.symbols import example
from monarch.compiler.types import TensorType

LEAST_BYTES = 4096


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are needed from the instruction `first` up to and with `last`."""

    size: int
    first: int
    last: int


def pack(spans: Sequence[Lifetime]) -> tuple[int, list[int]]:
    """An offset for each span such that no two that are needed at once overlap, and the bytes that this takes.

    Greedy by size: the largest first, each into the smallest gap that holds it between those that live with it
    (Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020, arXiv 2001.03288)."""
    offsets = [0] * len(spans)
    lives = np.array([(span.first, span.last) for span in spans], dtype=np.int64).reshape(-1, 2)
    placed = np.empty((len(spans), 4), dtype=np.int64)
    """Offset, end, first and last of those that have their place, by offset."""
    total = 0
    order = sorted(range(len(spans)), key=lambda each: (-spans[each].size, spans[each].first, each))
    for count, number in enumerate(order):
        size, (first, last) = spans[number].size, lives[number]
        there = placed[:count]
        there = there[(there[:, 2] <= last) & (there[:, 3] >= first)]
        free = np.zeros(len(there) + 1, dtype=np.int64)
        """The first byte behind those in front of each, and behind all."""
        np.maximum.accumulate(there[:, 1], out=free[1:])
        gaps = there[:, 0] - free[:-1]
        holds = np.flatnonzero(gaps >= size)
        at = int(free[holds[gaps[holds].argmin()]] if len(holds) else free[-1])
        offsets[number] = at
        behind = int(np.searchsorted(placed[:count, 0], at, side="right"))
        placed[behind + 1 : count + 1] = placed[behind:count]
        placed[behind] = at, at + size, first, last
        total = max(total, at + size)
    return total, offsets


def lower_bound(spans: Sequence[Lifetime]) -> int:
    """The most bytes that are needed at once: no packing takes less."""
    changes: dict[int, int] = {}
    for span in spans:
        changes[span.first] = changes.get(span.first, 0) + span.size
        changes[span.last + 1] = changes.get(span.last + 1, 0) - span.size
    most = now = 0
    for at in sorted(changes):
        now += changes[at]
        most = max(most, now)
    return most


@dataclass
class Placing:
    """The results of a schedule's instructions that are in the arena, with their offsets; in the example, for named
    sizes."""

    schedule: Schedule
    dense: set[fx.Node] = field(default_factory=set)
    """Values that are known to be contiguous."""
    foreign: set[fx.Node] = field(default_factory=set)
    """Roots of the operands of users' own ops, which might return them."""
    spans: list[Lifetime] = field(default_factory=list)

    def run(self) -> tuple[int, list[Instruction]]:
        """The bytes of the arena, and the instructions with their regions."""
        instructions, calls = self.schedule.instructions, self.schedule.calls
        for call in calls:
            if not isinstance(call.target, ops.MonarchOp) and _namespace(call) not in ("aten", "prims", ""):
                self.foreign.update(self.schedule.roots[operand] for operand in call.all_input_nodes)
        numbers = [number for number, instruction in enumerate(instructions) if instruction.op != "commit"]
        found: list[tuple[int, list[TensorType | None]]] = []
        """For each instruction with results in the arena its number, and the types of these."""
        for at, (number, call) in enumerate(zip(numbers, calls, strict=True)):
            types = self.results(at, call, instructions[number])
            if any(types):
                found.append((number, types))
        arena, offsets = pack([replace(span, size=example(span.size)) for span in self.spans])
        starts = iter(offsets)
        placed = list(instructions)
        for number, types in found:
            regions = [
                None if type_ is None else ArenaRange(next(starts), type_.dtype, self.schedule.graph.local_shape(type_))
                for type_ in types
            ]
            placed[number] = replace(placed[number], regions=tuple(regions))
        return arena, placed

    def results(self, at: int, call: fx.Node, instruction: Instruction) -> list[TensorType | None]:
        """For each result of a call its type, if it is in the arena, and None otherwise."""
        if call.target is ops.kernel:
            return self.results_of_kernel(at, call)
        if self.is_dense(call, instruction.op):
            self.dense.add(call)
            if out_form(instruction.op) is not None:
                return [self.span(at, at, [call])]
        return []

    def results_of_kernel(self, at: int, call: fx.Node) -> list[TensorType | None]:
        _, text, over = args_of(call)
        found: list[TensorType | None] = []
        takers: dict[int, list[fx.Node]] = {}
        for user in call.users:
            takers.setdefault(args_of(user)[1], []).append(user)
        for output, (buffer, operand) in enumerate(zip(parse_kernel(text).outputs, over, strict=True)):
            taken = takers.get(output, [])
            dense = is_row_major(buffer.shape, buffer.strides)
            if dense:
                self.dense.update(taken)
            # A result without readers lives as long as the tuple that has it.
            placed = dense and operand < 0 and taken
            found.append(self.span(at, self.schedule.last.get(call, at), taken) if placed else None)
        return found

    def span(self, at: int, last: int, values: Sequence[fx.Node]) -> TensorType | None:
        """Note how long a buffer is needed that one call makes, if it may be in the arena: then the type of its
        value."""
        type_ = tensor_type(values[0])
        size = local_bytes(self.schedule.graph, type_)
        for value in values:
            root = self.schedule.roots[value]
            sharing = self.schedule.members.get(root, (root,))
            if (
                example(size) < LEAST_BYTES
                or not size
                or root in self.foreign
                or any(each not in self.schedule.last for each in sharing)
            ):
                return None
            last = max(last, *(self.schedule.last[each] for each in sharing))
        self.spans.append(Lifetime(-(-size // ALIGN) * ALIGN, at, last))
        return type_

    def is_dense(self, call: fx.Node, op: str) -> bool:
        """Whether a call's result is known to be contiguous, whatever its memory."""
        if op in PRODUCTS:
            return True
        if isinstance(call.target, ops.MonarchOp):
            return False
        if out_form(op) is not None or op.startswith(("aten.view.", "aten.reshape.")):
            return all(operand in self.dense for operand in call.all_input_nodes)
        return False


def _namespace(call: fx.Node) -> str:
    """ "aten" of an op of torch's; empty for getitem."""
    return str(getattr(call.target, "namespace", ""))
