"""Whether workers can run a plan: the controller checks it before they load it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.plan import OPS, Plan, PlanError, Slot
from monarch.compiler.plan.check_parts import MOVING, wrong_parts
from monarch.compiler.plan.waits import wrong_wait

COLLECTIVES = frozenset(name for name, op in OPS.items() if op.collective)
WITH_FUNCTIONS = frozenset({"cond", "while_loop", "scan"})
"""Ops that call functions of their plan."""


def check(plan: Plan) -> None:
    """Raise PlanError unless every op of the plan is known and every slot that is read has been written."""
    if plan.parts:
        if (misfit := wrong_parts(plan)) is not None:
            raise PlanError(f"plan '{plan.name}': {misfit}")
        for part in plan.parts:
            check(part.plan)
        return
    written = {spec.slot for spec in plan.inputs} | set(plan.constant_slots.values())
    for number, instruction in enumerate(plan.instructions):
        if instruction.op == "kernel" and (len(instruction.args) != 3 or instruction.kwargs):
            raise PlanError(f"instruction {number} of plan '{plan.name}': a kernel takes (tensors, text, over)")
        if instruction.op not in LOCAL_OPS and instruction.op not in (*COLLECTIVES, *WITH_FUNCTIONS, *MOVING):
            overload(instruction.op)
        for slot in slots_of((instruction.args, tuple(instruction.kwargs.values()))):
            if slot not in written:
                raise PlanError(
                    f"instruction {number} of plan '{plan.name}' ({instruction.op}) reads empty slot {slot}"
                )
        if instruction.op != "commit":
            written.add(instruction.out)
        written.difference_update(instruction.free)
    if (wrong := wrong_wait(plan)) is not None:
        raise PlanError(f"instruction {wrong[0]} of plan '{plan.name}': {wrong[1]}")
    for function in plan.functions.values():
        check(function)
    for spec in plan.outputs:
        if spec.slot not in written:
            raise PlanError(f"output {spec.label!r} of plan '{plan.name}' is empty slot {spec.slot}")
    if len(plan.donated) != len(plan.inputs):
        raise PlanError(f"plan '{plan.name}' has {len(plan.inputs)} inputs and says of {len(plan.donated)} if donated")


def slots_of(value: Any) -> list[int]:
    """The numbers of the slots in an argument of an instruction, in order."""
    if isinstance(value, Slot):
        return [value.index]
    if isinstance(value, (list, tuple)):
        return [slot for item in value for slot in slots_of(item)]
    return []


def overload(op: str) -> Callable[..., Any]:
    """The callable for "getitem" or an ATen (or other registered) overload, as in "aten.mm.default". Raises
    PlanError."""
    if op == "getitem":
        return operator.getitem
    parts = op.split(".")
    if len(parts) == 3 and all(part.isidentifier() for part in parts):
        namespace, name, which = parts
        try:
            found = getattr(getattr(getattr(torch.ops, namespace), name), which)
        except (AttributeError, RuntimeError):
            found = None
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise PlanError(
        f"the plan calls {op!r}, which the workers do not know",
        hint="Make an op of your own with torch.library.custom_op, which travels with the plan, or register it before\n"
        "the mesh is made: workers are forked then.",
    )
