"""Per-worker code: which values the workers along a mesh dim have each of their own, and the values that follow.

A value that is computed from one that varies along a mesh dim varies along it too, unless `from_varying` has made it
one value of the mesh again. There is nothing to choose for such an op: each worker runs it on what it has, and operands
that do not vary are whole on every worker.
"""

from __future__ import annotations

import operator

from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import LayoutError
from monarch.compiler.graph import Graph, args_of, provenance, tensor_type
from monarch.compiler.rules import Strategy, tensor_operands
from monarch.compiler.rules.call import result_types
from monarch.compiler.text import parse_layout
from monarch.compiler.types import VARYING, Placement


def varying_along(graph: Graph, mesh_dim: str) -> set[fx.Node]:
    """The values that vary along a mesh dim over which the graph is not partitioned yet.

    Raises LayoutError for a value that is to vary twice, for a layout() that places a varying value along the mesh dim,
    and for state that does not vary and is updated with a value that does.
    """
    found: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            if tensor_type(node).layout.placement(mesh_dim) == VARYING:
                found.add(node)
        elif node.op == "call_function" and _varies(node, mesh_dim, found):
            found.add(node)
    states = graph.states
    for label, node in graph.updates.items():
        state = states.get(label)
        if state is not None and node in found and state.layout.placement(mesh_dim) != VARYING:
            raise LayoutError(
                f"state '{label}', which is {state}, is updated with a value that varies along '{mesh_dim}'",
                hint=f"reduce it first, as monarch.reduce(x, {mesh_dim!r}, 'avg') does.",
                source=provenance(node).source,
            )
    return found


def _varies(node: fx.Node, mesh_dim: str, found: set[fx.Node]) -> bool:
    if node.target is operator.getitem:
        return args_of(node)[0] in found
    varies = bool(found) and any(operand in found for operand in tensor_operands(node))
    if not begins(node, mesh_dim) and not ends(node, mesh_dim):
        if varies and node.target is ops.constrain and _laid_out(node, mesh_dim) is not None:
            raise LayoutError(
                f"layout() says {args_of(node)[1]} of a value that varies along '{mesh_dim}'",
                hint=f"leave '{mesh_dim}' out: each worker along it has a tensor of its own.",
                source=provenance(node).source,
            )
        return varies
    if varies and node.target is ops.to_varying and args_of(node)[2] is not None:
        raise LayoutError(
            f"%{node.name} takes blocks along '{mesh_dim}' of a value that varies along it already",
            source=provenance(node).source,
        )
    return begins(node, mesh_dim)


def begins(node: fx.Node, mesh_dim: str) -> bool:
    """Whether a call's result varies along the mesh dim, whatever its operands do."""
    if node.target in (ops.to_varying, ops.axis_index):
        return bool(args_of(node)[-1 if node.target is ops.axis_index else 1] == mesh_dim)
    return node.target is ops.permute and mesh_dim in args_of(node)[1]


def ends(node: fx.Node, mesh_dim: str) -> bool:
    """Whether a call makes one value of the mesh of values that the workers along the mesh dim have of their own."""
    return node.target is ops.from_varying and args_of(node)[1] == mesh_dim


def strategy_of(node: fx.Node, mesh_dim: str, varying: set[fx.Node]) -> Strategy | None:
    """The one way to run a call that takes or gives values that vary along the mesh dim; None for another call."""
    if ends(node, mesh_dim):
        return Strategy((VARYING,), (args_of(node)[2],), "")
    if node not in varying or node.target is operator.getitem:
        return None
    operands = tensor_operands(node)
    takes: list[Placement] = [VARYING if operand in varying else None for operand in operands]
    if node.target is ops.to_varying and args_of(node)[1] == mesh_dim and VARYING not in takes:
        takes = [args_of(node)[2]]
    if node.target is ops.permute and begins(node, mesh_dim):
        takes = [VARYING] * len(operands)
    return Strategy(tuple(takes), (VARYING,) * len(result_types(node)), "")


def _laid_out(node: fx.Node, mesh_dim: str) -> Placement:
    return parse_layout(args_of(node)[1]).placement(mesh_dim)
