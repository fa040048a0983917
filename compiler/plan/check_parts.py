"""Whether the parts of a plan fit together: from what is written in them alone, and not from how they were made.

Every transfer has one `send` and one `recv`, each in its own part. No schedule of the parts waits in a circle: the
parts are run here, one instruction of some part after the other, where a `recv` waits for its `send`, a `send` for all
readers of what its part has sent before, and a `commit` for all parts. None of these ever has to wait again once it
need not, so what comes to an end in one order does so in all. Workers count on each part's sends and receives standing
in the order of the transfers' numbers.
"""

from __future__ import annotations

from typing import Any

from monarch.compiler.plan.plan import Instruction, Plan
from monarch.compiler.plan.transfers import Transfer

MOVING = ("send", "recv")
"""The instructions that join parts."""

MAX_WORKERS = 4096
"""Of a mesh whose parts a plan may be for: who sends what to whom is listed by worker."""


def wrong_parts(plan: Plan) -> str | None:
    """What is wrong with how the parts of a plan fit together, if anything is."""
    if plan.instructions or plan.slots or plan.constants or plan.constant_slots or plan.functions or plan.arena:
        return "it has parts, and instructions of its own"
    return _wrong_places(plan) or _wrong_values(plan) or _wrong_transfers(plan) or _wrong_order(plan)


def _wrong_places(plan: Plan) -> str | None:
    if plan.mesh.workers > MAX_WORKERS:
        return f"it has parts, and its mesh {plan.mesh.workers} workers: more than {MAX_WORKERS}"
    owner: dict[int, str] = {}
    for part in plan.parts:
        if part.plan.parts or part.plan.transfers:
            return f"part {part.name!a} has parts of its own"
        if tuple(part.place.extent.items()) != part.plan.mesh.dims:
            return f"part {part.name!a} is on {part.plan.mesh}, and its place is {part.place.extent}"
        for rank in part.place.ranks():
            if rank >= plan.mesh.workers:
                return f"part {part.name!a} has worker {rank}, and the mesh is {plan.mesh}"
            if owner.setdefault(rank, part.name) != part.name:
                return f"parts {owner[rank]!a} and {part.name!a} both have worker {rank}"
    return None


def _wrong_values(plan: Plan) -> str | None:
    for number, part in enumerate(plan.parts):
        for what in ("inputs", "outputs"):
            if tuple(spec for spec in getattr(plan, what) if spec.part == number) != getattr(part.plan, what):
                return f"its {what} are not those of part {part.name!a}"
        given = [donated for spec, donated in zip(plan.inputs, plan.donated, strict=False) if spec.part == number]
        if tuple(given) != part.plan.donated:
            return f"what it may overwrite is not what part {part.name!a} may"
    if any(not 0 <= spec.part < len(plan.parts) for spec in (*plan.inputs, *plan.outputs)):
        return f"an input or output is of no part: there are {len(plan.parts)}"
    return None


def _wrong_transfers(plan: Plan) -> str | None:
    for number, transfer in enumerate(plan.transfers):
        sent, received = transfer.sent, transfer.received
        if not (0 <= transfer.source < len(plan.parts) and 0 <= transfer.target < len(plan.parts)):
            return f"transfer {number} is of no part: there are {len(plan.parts)}"
        if transfer.source == transfer.target:
            return f"transfer {number} stays in part {plan.parts[transfer.source].name!a}"
        if (sent.dtype, sent.unpadded.shape) != (received.dtype, received.unpadded.shape):
            return f"transfer {number} sends {sent}, and {received} is received"
        if any(type_.layout.partial or type_.layout.varying for type_ in (sent, received)):
            return f"transfer {number} is of summands or of workers' own values: {sent} is received as {received}"
    for op in MOVING:
        right = [(transfer.source if op == "send" else transfer.target) for transfer in plan.transfers]
        numbers: list[int] = []
        for at, part in enumerate(plan.parts):
            for instruction in part.plan.instructions:
                if instruction.op != op:
                    continue
                number = _number(instruction)
                if type(number) is not int or not 0 <= number < len(right):
                    return f"part {part.name!a} has a {op} of transfer {number!a:.40}: there are {len(right)}"
                if right[number] != at:
                    return f"part {part.name!a} has the {op} of transfer {number}, which is another part's"
                type_ = plan.transfers[number].received
                if op == "recv" and instruction.args[1:] != (list(type_.local_shape(part.plan.mesh)), type_.dtype):
                    return f"part {part.name!a} receives another block of transfer {number} than its type says"
                numbers.append(number)
        for number in range(len(right)):
            if numbers.count(number) != 1:
                return f"transfer {number} has {numbers.count(number)} {op} instructions"
    return None


def _wrong_order(plan: Plan) -> str | None:
    """Run the parts, and say where all of them wait."""
    waiting = [[each for each in part.plan.instructions if each.op in (*MOVING, "commit")] for part in plan.parts]
    for part, own in zip(plan.parts, waiting, strict=True):
        numbers = [_number(each) for each in own if each.op in MOVING]
        for before, number in zip(numbers, numbers[1:], strict=False):
            if number <= before:
                return f"part {part.name!a} has transfer {number} behind transfer {before}: they go by their numbers"
    commits = [[each.op for each in own].count("commit") for own in waiting]
    if len(set(commits)) > 1:
        return f"its parts commit {', '.join(map(str, commits))} times: together, or none of them"
    sent: list[int] = []
    received: set[int] = set()
    while any(waiting):
        moved = False
        for own in waiting:
            while own and _goes_on(own[0], plan.transfers, sent, received):
                number = _number(own[0])
                sent.append(number) if own[0].op == "send" else received.add(number)
                del own[0]
                moved = True
        if not moved and all(own and own[0].op == "commit" for own in waiting):
            for own in waiting:
                del own[0]
        elif not moved:
            at = next(at for at, own in enumerate(waiting) if own)
            first = waiting[at][0]
            what = "to commit" if first.op == "commit" else f"in the {first.op} of transfer {_number(first)}"
            return f"its parts wait for one another: part {plan.parts[at].name!a} {what}, without end"
    return None


def _goes_on(instruction: Instruction, transfers: tuple[Transfer, ...], sent: list[int], received: set[int]) -> bool:
    number = _number(instruction)
    if instruction.op == "recv":
        return number in sent
    if instruction.op == "commit":
        return False
    return all(other in received or transfers[other].source != transfers[number].source for other in sent)


def _number(instruction: Instruction) -> Any:
    """The transfer that an instruction names: the second argument of `send`, the first of `recv`."""
    at = 1 if instruction.op == "send" else 0
    return instruction.args[at] if len(instruction.args) > at else instruction.kwargs.get("transfer")
