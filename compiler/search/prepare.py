"""The graph on which layouts are searched: with all dims apart that a layout might shard."""

from __future__ import annotations

import torch

from monarch.compiler.context import Context
from monarch.compiler.graph import Graph
from monarch.compiler.passes.batches import find_merged
from monarch.compiler.passes.decompose import inline
from monarch.compiler.passes.simplify import SimplifyViews

aten = torch.ops.aten

_APART = (
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
)
"""What the partitioner takes apart where a layout shards its dims: losses, whose classes or batch are always worth it.
Norms are not, for they are narrow, nor is the softmax of attention."""


def prepare(graph: Graph) -> Graph:
    """A copy of a traced graph in which the search may choose for each dim. Where layouts ask for it, the passes of the
    pipeline do the same."""
    graph = SimplifyViews().run(graph.copy(), Context())
    for node in list(graph.calls):
        if node.target in _APART:
            inline(graph, node)
    if find_merged(graph, rows=True).keep(lambda view: True):
        graph = SimplifyViews().run(graph, Context())
    return graph
