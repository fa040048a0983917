"""Whether the choice for a few equal blocks would be the same for any number of them.

In a graph whose equal blocks are folded (`compiler/passes/fold.py`) eight blocks are weighed against the rest of the
program. With more of them it could pay to bring their values to another layout in front of the first and back behind
the last, or to gather for all what each gathers for itself. So the cheapest block is looked for that follows itself,
with all that it reads of the rest for nothing: where it costs less than the block that was chosen, more blocks could
lead to another choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from monarch.compiler.graph import provenance
from monarch.compiler.partition.solve import CostNetwork, Table

BEFORE, FIRST, LAST = range(3)
"""`Provenance.block`: a block that stands for others, the one before it, and the one behind it."""
TOLERANCE = 1e-9


class Unsteady(Exception):
    """More blocks could lead to another choice."""


def check_steady(
    nodes: Sequence[fx.Node],
    operands: Mapping[fx.Node, Sequence[fx.Node]],
    own: Mapping[fx.Node, Sequence[float]],
    edge: Callable[[fx.Node, fx.Node], Table],
    picked: Mapping[fx.Node, int],
) -> None:
    """Raise Unsteady where a cheaper block could follow itself. `own` has the cost of each alternative of a node,
    `edge` those of a node with those of an operand, and `picked` the choice."""
    blocks: tuple[list[fx.Node], list[fx.Node], list[fx.Node]] = ([], [], [])
    for node in nodes:
        block = provenance(node).block
        if block is not None and block <= LAST:
            blocks[block].append(node)
    first = blocks[FIRST]
    if not first:
        return
    like = {node: mine for block in blocks for node, mine in zip(block, first, strict=False)}
    sizes = [[len(own[node]) for node in block] for block in blocks]
    if not sizes[BEFORE] == sizes[FIRST] == sizes[LAST]:
        raise Unsteady
    network, numbers, cost = CostNetwork(), dict[fx.Node, int](), 0.0

    def variable(node: fx.Node, costs: Sequence[float]) -> int:
        if node not in numbers:
            numbers[node] = network.variable(list(costs))
        return numbers[node]

    for node in first:
        variable(node, own[node])
        cost += own[node][picked[node]]
    for node in first:
        for operand in dict.fromkeys(operands[node]):
            if operand.op == "placeholder":
                continue
            costs = edge(node, operand)
            cost += float(costs[picked[operand], picked[node]])
            of = like.get(operand, operand)
            network.pair(variable(of, [0.0] * len(own[operand])), numbers[node], costs)
    least = network.cost(network.solve())
    if not network.exact or least < cost - TOLERANCE * abs(cost):
        raise Unsteady
