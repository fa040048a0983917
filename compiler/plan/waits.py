"""Collectives that are started in one instruction of a plan and waited for in a later one."""

from __future__ import annotations

from monarch.compiler.ops import OPS
from monarch.compiler.plan.arena import slots_in
from monarch.compiler.plan.plan import Instruction, Plan, Slot

STARTED = frozenset({"nccl"})
"""What of `plan.options.BACKENDS` only starts a collective where it stands: its result is there behind a "wait"."""

_COLLECTIVES = frozenset(name for name, op in OPS.items() if op.collective) - {"commit", "wait"}


def wrong_wait(plan: Plan) -> tuple[int, str] | None:
    """The first instruction that waits for what was not started, or reads what was not waited for, and what is wrong
    with it; an output that was not waited for goes by the number of instructions."""
    pending: dict[int, list[int]] = {}
    """By slot a collective's result that nobody has waited for, and the slots of what it moves."""
    strict = plan.collectives in STARTED
    for number, instruction in enumerate(plan.instructions):
        if instruction.op == "wait":
            if (wrong := _wrong(instruction, pending)) is not None:
                return number, wrong
        elif strict:
            for slot in slots_in((instruction.args, tuple(instruction.kwargs.values()))):
                if slot in pending:
                    return number, f"it reads slot {slot}, and nobody has waited for what a collective makes there"
        pending.pop(instruction.out, None)
        if instruction.op in _COLLECTIVES:
            pending[instruction.out] = list(slots_in(_given(instruction, "tensors", 0)))
        for slot in instruction.free:
            pending.pop(slot, None)
    if strict and (left := [spec for spec in plan.outputs if spec.slot in pending]):
        return len(plan.instructions), f"nobody waits for output {left[0].label!a}"
    return None


def _wrong(instruction: Instruction, pending: dict[int, list[int]]) -> str | None:
    started, tensors = _given(instruction, "pending", 0), _given(instruction, "tensors", 1)
    moved = pending.pop(started.index, None) if isinstance(started, Slot) else None
    if moved is None:
        return "it waits for what is no collective's result, or was waited for before"
    if not isinstance(tensors, list) or [each.index for each in tensors if isinstance(each, Slot)] != moved:
        return "it has to take the tensors that its collective moves"
    return None


def dims_of(plan: Plan, number: int) -> tuple[str, ...]:
    """The mesh dims of the collective that instruction `number`, a "wait", waits for."""
    started = _given(plan.instructions[number], "pending", 0)
    for each in reversed(plan.instructions[:number]):
        if isinstance(started, Slot) and each.out == started.index:
            dims = _given(each, "mesh_dims", 1)
            return tuple(dims) if isinstance(dims, list | tuple) else ()
    return ()


def _given(instruction: Instruction, name: str, at: int) -> object:
    return instruction.args[at] if len(instruction.args) > at else instruction.kwargs.get(name)
