"""How each op partitions: one line over factors an op.

`rule_for(node, shape_of)` gives a call's `Rule`; `Rule.strategies(k)` all ways to place the call on a mesh dim of size
k; `localize` the call that each worker then makes. `sharding_rule` registers an op, also a user's own.
"""

# The tables register their ops as they are imported.
from monarch.compiler.rules import (  # noqa: F401
    attention,
    convolution,
    factory,
    fourier,
    index,
    linalg,
    losses,
    matmul,
    norms,
    ours,
    pointwise,
    reduce,
    searching,
    views,
)
from monarch.compiler.rules.call import Call, replace_operands, tensor_operands
from monarch.compiler.rules.line import Line
from monarch.compiler.rules.localize import LocalCall, localize, localizer
from monarch.compiler.rules.register import fits, rule_for, sharding_rule
from monarch.compiler.rules.rule import PARTIAL, Rule, Strategy

__all__ = [
    "PARTIAL",
    "Call",
    "Line",
    "LocalCall",
    "Rule",
    "Strategy",
    "fits",
    "localize",
    "localizer",
    "replace_operands",
    "rule_for",
    "sharding_rule",
    "tensor_operands",
]
