"""The seed and the numbers of its call that a region reads become inputs of it like any other."""

from __future__ import annotations

import torch
from torch import fx

from monarch.compiler.graph import Graph, tensor_type
from monarch.compiler.types import TensorType

aten = torch.ops.aten

Lifted = tuple[str, str, torch.dtype]
"""A number of the call that a region reads: its placeholder's kind and label, and its dtype."""

ROUND = 0x5851F42D4C957F2D
"""A loop adds this to its seed from one round to the next (the multiplier of Knuth's MMIX generator: any large odd
number will do, for seeds are mixed)."""


def own_inputs(graph: Graph) -> list[Lifted]:
    """The placeholders of a region that are no inputs: numbers of the call."""
    return [
        (node.meta["kind"], str(node.meta["label"]), tensor_type(node).dtype)
        for node in graph.placeholders
        if node.meta["kind"] != "input"
    ]


def lift(graph: Graph, lifted: list[Lifted], loop: bool) -> None:
    """Make a region's numbers of the call inputs, behind its others; a loop's number of the round stays last, and the
    seed of a round comes of it."""
    given = sorted((node for node in graph.placeholders if node.meta["kind"] == "input"), key=lambda n: n.meta["label"])
    index = given.pop() if loop else None
    own = {(node.meta["kind"], str(node.meta["label"])): node for node in graph.placeholders if node not in given}
    for kind, label, dtype in lifted:
        node = own.get((kind, label))
        if node is None:
            first = next(iter(graph.fx.nodes))
            with graph.fx.inserting_before(first):
                node = graph.placeholder("input", 0, TensorType(dtype, ()), label)
        elif kind == "seed" and index is not None:
            _seed_of_round(graph, node, index)
        node.meta["kind"] = "input"
        given.append(node)
    if index is not None:
        given.append(index)
    first_call = next(node for node in graph.fx.nodes if node.op != "placeholder")
    for at, node in enumerate(given):
        node.meta["label"] = at
        first_call.prepend(node)


def _seed_of_round(graph: Graph, seed: fx.Node, index: fx.Node) -> None:
    type_ = tensor_type(seed)
    with graph.fx.inserting_before(next(node for node in graph.fx.nodes if node.op != "placeholder")):
        offset = graph.call(aten.mul.Tensor, index, ROUND, type=type_)
        own = graph.call(aten.add.Tensor, seed, offset, type=type_)
    seed.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
