"""How a call's literal arguments change where its tensors become local: sizes, ranges, ops of sharded indexing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from monarch.compiler.ops.record import enter, find
from monarch.compiler.rules.call import Call
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


def localizer(ops: str) -> Callable[[Localizer], Localizer]:
    """Register how calls of these ops (names, with or without an overload, separated by spaces) are localized. Those of
    other ops keep their arguments."""

    def register(function: Localizer) -> Localizer:
        enter(ops.split(), localize=function)
        return function

    return register


def localize_sizes(ops: str, argument: str) -> None:
    """Of these ops, which take the sizes of what they make, a worker's calls take those of its block."""
    localizer(ops)(lambda call: call.replace(**{argument: list(call.result)}))


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
    function = find(node.target, "localize")
    if function is None or strategy.factor in ("", PARTIAL):
        return node.target, node.args, dict(node.kwargs)
    return function(LocalCall(node, local_operand_shapes, local_result_shapes, strategy, mesh_dim, k))
