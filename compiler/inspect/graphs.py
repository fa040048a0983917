"""The CUDA graphs of a plan: the ops in them, the ops between them and why, and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch.compiler.inspect.values import kernel_name, local_bytes
from monarch.compiler.loading import load
from monarch.compiler.plan import Plan, Slot

if TYPE_CHECKING:
    from monarch.compiler.plan.stretches import Stretches


def graphs_of(plan: Plan) -> dict[str, Any]:
    """`graphs` has for each how many ops it launches, and the lines of the first and the last; `between` what cannot be
    in one: op, line, why, and how often; `alone` how many ops could be in one, and stand alone. With a report also
    `kept_bytes`: the memory that graphs have for what they read and leave, beside that which they need while they
    run."""
    found: Stretches = load("monarch.compiler.plan.stretches:stretches_of")(plan)
    between: dict[tuple[str, str, str], int] = {}
    for number, why in found.ends:
        key = _op(plan, number), _where(plan, number), why
        between[key] = between.get(key, 0) + 1
    return {
        "graphs": [
            {
                "ops": stretch.launches,
                "from": next(filter(None, (_where(plan, at) for at in range(stretch.start, stretch.stop))), ""),
                "to": next(filter(None, (_where(plan, at) for at in reversed(range(stretch.start, stretch.stop)))), ""),
            }
            for stretch in found.stretches
        ],
        "between": [
            {"op": op, "where": where, "why": why, "count": count} for (op, where, why), count in between.items()
        ],
        "alone": len(found.short),
        **({} if plan.report is None else {"kept_bytes": _kept(plan, found)}),
    }


def _op(plan: Plan, number: int) -> str:
    instruction = plan.instructions[number]
    return kernel_name(str(instruction.args[1])) if instruction.op == "kernel" else instruction.op


def _where(plan: Plan, number: int) -> str:
    source = plan.instructions[number].source
    if not 0 <= source < len(plan.sources):
        return ""
    return f"{plan.sources[source].file.rsplit('/', 1)[-1]}:{plan.sources[source].line}"


def _kept(plan: Plan, found: Stretches) -> int:
    """Of a graph's inputs, those that are copied for it; of its results, those that it makes."""
    sizes = {spec.slot: local_bytes(spec.type, plan.mesh) for spec in plan.inputs}
    for value in plan.report.values if plan.report is not None else ():
        if value.instruction >= 0 and value.types and value.types[0] is not None:
            sizes[plan.instructions[value.instruction].out] = local_bytes(value.types[0], plan.mesh)
    makers = {each.out: each for each in plan.instructions}
    shares_first, stay = (
        load("monarch.compiler.plan.stretches:shares_first"),
        load("monarch.compiler.plan.stretches:staying")(plan),
    )
    left: set[int] = set()
    kept = 0
    for stretch in found.stretches:
        copied = [slot for slot in stretch.reads if slot not in stay and slot not in left]
        kept += sum(sizes.get(slot, 0) for slot in copied)
        roots: set[int] = set()
        for slot in stretch.gives:
            root = slot
            while root in makers and root not in stretch.reads and shares_first(makers[root].op):
                (root, *_) = [value.index for value in makers[root].args[:1] if isinstance(value, Slot)] or [-1]
            roots.add(root)
        kept += sum(sizes.get(root, 0) for root in roots if root not in stay and root not in stretch.reads)
        left.update(copied, stretch.gives)
    return kept


def sentence(found: dict[str, Any]) -> str:
    """How many graphs there are, of how many ops."""
    ops = [each["ops"] for each in found["graphs"]]
    if not ops:
        return "none: no 2 ops that could be in one stand beside each other"
    many = f"{len(ops):,} graph{'s' * (len(ops) > 1)} of {', '.join(f'{each:,}' for each in ops[:8])}"
    return f"{many}{' …' if len(ops) > 8 else ''} ops" + (f"; {found['alone']:,} alone" if found["alone"] else "")
