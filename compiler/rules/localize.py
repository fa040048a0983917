"""How a call's literal arguments change where its tensors become local: sizes, ranges, ops of sharded indexing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from monarch.compiler.rules.call import Call, lookup
from monarch.compiler.rules.line import Shape
from monarch.compiler.rules.rule import PARTIAL, Strategy

Localized = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Target, positional arguments, keyword arguments."""


class LocalCall(Call):
    """A call that is about to become local along one mesh dim: `shapes` and `results` are what a worker holds after it.

    `strategy`   how the call is placed along the mesh dim
    `mesh_dim`   its name
    `k`          its size
    """

    def __init__(
        self,
        node: fx.Node,
        operand_shapes: Sequence[Shape],
        result_shapes: Sequence[Shape | None],
        strategy: Strategy,
        mesh_dim: str,
        k: int,
    ) -> None:
        super().__init__(node, operand_shapes, result_shapes)
        self.strategy = strategy
        self.mesh_dim = mesh_dim
        self.k = k

    def unchanged(self) -> Localized:
        return self.target, self.node.args, dict(self.node.kwargs)


Localizer = Callable[[LocalCall], Localized]

LOCALIZERS: dict[str, Localizer] = {}
"""By op name, with or without its overload. Ops that are not here keep their arguments."""


def localizer(ops: str) -> Callable[[Localizer], Localizer]:
    """Register how calls of these ops (names, separated by spaces) are localized."""

    def register(function: Localizer) -> Localizer:
        LOCALIZERS.update(dict.fromkeys(ops.split(), function))
        return function

    return register


def localize(
    node: fx.Node,
    local_operand_shapes: Sequence[Shape],
    local_result_shapes: Sequence[Shape | None],
    strategy: Strategy,
    mesh_dim: str,
    k: int,
) -> Localized:
    """The call that each worker along `mesh_dim` makes under `strategy`: (target, args, kwargs).

    `local_operand_shapes` has one shape for each of `tensor_operands(node)`, `local_result_shapes` one for each result
    (anything for one that is not made), both sharded along `mesh_dim` already. Arguments still name `node`'s own
    operands, in the same order and number as before, so that the caller can put the resharded ones in their place one
    by one (`replace_operands`).
    """
    function = lookup(LOCALIZERS, node.target)
    if function is None or strategy.factor in ("", PARTIAL):
        return node.target, node.args, dict(node.kwargs)
    return function(LocalCall(node, local_operand_shapes, local_result_shapes, strategy, mesh_dim, k))
