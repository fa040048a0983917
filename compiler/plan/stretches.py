"""Which parts of a plan for a GPU are one CUDA graph each: what is said by `cuda_graphs` in a plan, worked out.

A stretch is a run of instructions that only launch work on the device, always the same for the same addresses. It ends
where the host has to take part: at a collective, at the commit, at an op whose result the host has to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from monarch.compiler.attention import IN_PARTS
from monarch.compiler.names import find_op
from monarch.compiler.ops import OPS
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.plan.arena import slots_in
from monarch.compiler.plan.plan import Instruction, Plan, Slot

LEAST = 2
"""Ops that launch something, in a stretch: a graph of one spares nothing."""


@dataclass(frozen=True)
class Stretch:
    """The instructions from `start` to `stop` (not included). `apart` are those among them that take a part of a value
    from elsewhere, and are run before. `reads` and `gives` are the slots that the others take and leave, and `frees`
    those from elsewhere that nobody reads behind it. `launches` counts ops that are no views."""

    start: int
    stop: int
    apart: tuple[int, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    frees: tuple[int, ...]
    launches: int


@dataclass(frozen=True)
class Stretches:
    """`stretches` in order; `ends` has, for each instruction that cannot be in one, its number and why; `short` the
    numbers of ops that could be, and have too few others beside them."""

    stretches: tuple[Stretch, ...] = ()
    ends: tuple[tuple[int, str], ...] = ()
    short: tuple[int, ...] = ()


def stretches_of(plan: Plan) -> Stretches:
    """What of a plan is captured, where it is to be."""
    slots = [spec.slot for spec in plan.inputs] + [*plan.constant_slots.values()]
    slots += [each.out for each in plan.instructions if each.out >= 0]
    if len(slots) != len(set(slots)):  # written by hand: all below takes a slot for one value
        return Stretches(ends=((0, "its slots hold one value after the other"),))
    found: list[Stretch] = []
    ends: list[tuple[int, str]] = []
    short: list[int] = []
    start = 0
    for number in range(len(plan.instructions) + 1):
        why = why_not(plan.instructions[number]) if number < len(plan.instructions) else ""
        if why is None:
            continue
        if why:
            ends.append((number, why))
        while start < number and plan.instructions[start].op == "getitem":  # of what the op before it gave
            start += 1
        stretch = _stretch(plan, start, number)
        if stretch.launches >= LEAST:
            found.append(stretch)
        else:
            short += (at for at in range(start, number) if _launches(plan.instructions[at]))
        start = number + 1
    return Stretches(tuple(found), tuple(ends), tuple(short))


def _stretch(plan: Plan, start: int, stop: int) -> Stretch:
    made: set[int] = set()
    apart: list[int] = []
    reads: dict[int, None] = {}
    freed: dict[int, None] = {}
    launches = 0
    for number in range(start, stop):
        instruction = plan.instructions[number]
        read = list(_read(instruction))
        freed.update(dict.fromkeys(instruction.free))
        if instruction.op == "getitem" and not made.intersection(read):
            apart.append(number)
            continue
        reads.update(dict.fromkeys(slot for slot in read if slot not in made))
        made.add(instruction.out)
        launches += _launches(instruction)
    later = {slot for each in plan.instructions[stop:] for slot in _read(each)} | {spec.slot for spec in plan.outputs}
    return Stretch(
        start,
        stop,
        tuple(apart),
        tuple(reads),
        tuple(sorted(made & later)),
        tuple(slot for slot in freed if slot not in made),
        launches,
    )


def staying(plan: Plan) -> frozenset[int]:
    """The slots whose values lie at the same address in every step, as long as nobody but the plan replaces them: those
    of states that it only reads or writes in place, of constants, and of views of these."""
    roots = {spec.slot: spec.slot for spec in plan.inputs} | {slot: slot for slot in plan.constant_slots.values()}
    over: dict[int, list[int | None]] = {}
    for each in plan.instructions:
        root: int | None = None
        first = each.args[0] if each.args else None
        if each.op == "kernel" and len(each.args) == 3:
            tensors, _, places = each.args
            over[each.out] = [roots.get(tensors[at].index) if at >= 0 else None for at in places]
        elif each.op == "getitem" and isinstance(first, Slot):
            elements = over.get(first.index, [])
            root = elements[each.args[1]] if each.args[1] in range(len(elements)) else None
        elif isinstance(first, Slot) and shares_first(each.op):
            root = roots.get(first.index)
        if root is not None:
            roots[each.out] = root
    after = {str(spec.label): spec.slot for spec in plan.outputs if spec.kind == "state"}
    stay = set(plan.constant_slots.values())
    for spec, donated in zip(plan.inputs, plan.donated, strict=True):
        if spec.kind == "state":
            stays = not donated or roots.get(after.get(str(spec.label), -1)) == spec.slot
            stay.update([spec.slot] if stays else [])
    return frozenset(slot for slot, root in roots.items() if root in stay)


# -- ops ---------------------------------------------------------------------------------------------------------------


def why_not(instruction: Instruction) -> str | None:
    """Why an instruction cannot be captured; None where it can."""
    op = instruction.op
    if op == "commit":
        return "the host waits for all workers"
    if op in OPS and OPS[op].collective:
        return "it moves tensors between workers"
    if op == "random":
        seed = instruction.args[3] if len(instruction.args) > 3 else instruction.kwargs.get("seed")
        return None if isinstance(seed, Slot) else "its seed comes from the host"
    if op == "out_of_place":
        return _why_not_aten(str(instruction.args[0]))
    if op in OPS or op == "getitem" or op in IN_PARTS:
        return None
    return _why_not_aten(op)


@cache
def _why_not_aten(op: str) -> str | None:
    namespace, name, _ = op.split(".")
    if namespace not in ("aten", "prims"):
        return f"whether an op of '{namespace}' waits for the device is not known"
    tags = find_op(op).tags
    if torch.Tag.nondeterministic_seeded in tags:
        return "it draws from torch's own generator"
    if torch.Tag.cudagraph_unsafe in tags:
        return "torch says that it cannot be captured"
    dynamic = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    if (dynamic and op != "aten.index.Tensor") or name.startswith(_ON_THE_HOST):  # no mask: shapes of a plan are fixed
        return "the host waits for its result"
    if any(not isinstance(given.type, _TENSORS) for given in find_op(op)._schema.returns):
        return "the host waits for its result"
    return None


_TENSORS = (torch.TensorType, torch.ListType)

_ON_THE_HOST = tuple(
    "_linalg_ linalg_ cholesky lu_ geqrf ormqr triangular_solve _fft_ histc histogram _histogramdd segment_reduce "
    "_ctc_loss _embedding_bag _assert _fused_moving_avg_obs_fq_helper is_nonzero".split()
)
"""How the names begin of ops that wait for the device, or may, though nothing in their schemas says so."""


def _launches(instruction: Instruction) -> bool:
    """Whether an op is more than a view."""
    return instruction.op != "getitem" and (instruction.op in OPS or not _views(instruction.op))


def _views(op: str) -> bool:
    return memory_of(find_op(op)).view


def shares_first(op: str) -> bool:
    """Whether an op's result surely lies in the memory of its first argument: that of a view, or of an op in place."""
    overload = find_op(op)
    return isinstance(overload, torch._ops.OpOverload) and memory_of(overload).exact


def _read(instruction: Instruction) -> Iterator[int]:
    return slots_in([instruction.args, [*instruction.kwargs.values()]])
