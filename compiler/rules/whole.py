"""The default rule: a call that no sharding rule covers takes its operands whole, and every worker computes all of it.

That is right for every op that gives the same results for the same operands. `monarch.compiler.partition.whole` says
what it costs.
"""

from __future__ import annotations

import torch

from monarch.compiler.errors import RuleError
from monarch.compiler.graph import provenance
from monarch.compiler.rules.call import Call, called_op, op_name
from monarch.compiler.rules.rule import Rule


def whole_rule(call: Call, reason: str) -> Rule:
    """The rule of a call that every worker computes whole, for this `reason`.

    Raises RuleError for an op that draws random numbers: each worker would draw its own."""
    if torch.Tag.nondeterministic_seeded in getattr(called_op(call.node), "tags", ()):
        raise draws_numbers(call)
    operands = tuple(((),) * len(shape) for shape in call.shapes)
    results = tuple(None if shape is None else ((),) * len(shape) for shape in call.results)
    return Rule(operands, results, {}, reason=reason)


def draws_numbers(call: Call) -> RuleError:
    """The error for an op that draws random numbers by itself."""
    return RuleError(
        f"{op_name(called_op(call.node))} draws random numbers of its own, which would differ from worker to worker",
        hint=(
            "Random numbers that are the same on any mesh come from the op `random`, which tracing puts in place of\n"
            "torch's: decompose this op into it, or turn its dropout off."
        ),
        source=provenance(call.node).source,
    )
