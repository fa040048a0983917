"""Small rewrites that leave less to partition."""

from __future__ import annotations

import torch
from torch import fx

from monarch.compiler.graph import Graph
from monarch.compiler.passes.base import Pass

aten = torch.ops.aten


class SimplifyViews(Pass):
    """Views that undo one another, or do nothing.

    %t = aten.t(%w)
    %u = aten.t(%t)
    %y = aten.mm(%x, %u)
    -->
    %y = aten.mm(%x, %w)
    """

    name = "simplify-views"

    def run(self, graph: Graph) -> Graph:
        for node in list(graph.calls):
            if node.target is aten.ones_like.default and node.meta["type"].shape == ():
                # The gradient that backward() starts from: a constant, which must not wait for the loss's value.
                node.target, node.args = aten.full.default, ([], 1)
                node.kwargs = {"dtype": node.meta["type"].dtype}
            source = _same_value(node)
            if source is not None:
                node.replace_all_uses_with(source)
        graph.fx.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        return graph


def _same_value(node: fx.Node) -> fx.Node | None:
    """The value that a view chain of one or two ops gives back unchanged."""
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node):
        return None
    if node.target is aten.t.default and x.target is aten.t.default:
        return x.args[0]  # type: ignore[return-value]
    if node.target in (aten.slice.Tensor, aten.slice_backward.default):
        # A slice that takes a whole dim, as `positions[:t]` does for the longest sequence.
        return x if x.meta["type"].shape == node.meta["type"].shape else None
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
        if x.meta["type"].shape == node.meta["type"].shape:
            return x
        views = (aten.view.default, aten._unsafe_view.default)
        if node.target in views and x.target in views:
            node.args = (x.args[0], *node.args[1:])
            return _same_value(node)
    return None
