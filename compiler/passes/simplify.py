"""Small rewrites that leave less to partition."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.ops import acts
from monarch.compiler.ops.schema import is_view

aten = torch.ops.aten


class SimplifyViews(Pass):
    """Views that undo one another, do nothing, or stand there twice.

    %t = aten.permute(%w, [1, 0])
    %u = aten.permute(%t, [1, 0])
    %y = aten.mm(%x, %u)
    -->
    %y = aten.mm(%x, %w)
    """

    name = "simplify-views"

    def run(self, graph: Graph, context: Context) -> Graph:
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.calls):
            if node.target is aten.ones_like.default and node.meta["type"].shape == ():
                # The gradient that backward() starts from: a constant, which must not wait for the loss's value.
                node.target, node.args = aten.full.default, ([], 1)
                node.kwargs = {"dtype": node.meta["type"].dtype}
            same = _same_value(node)
            if same is None and is_view(node.target) and not node.kwargs:
                same = seen.setdefault((node.target, str(args_of(node))), node)
            if same is not None and same is not node:
                node.replace_all_uses_with(same)
        erase_dead(graph)
        return graph


def erase_dead(graph: Graph) -> None:
    """Take out the calls that nobody reads and that do nothing else."""
    for node in reversed(list(graph.calls)):
        if not node.users and not acts(node.target):
            graph.fx.erase_node(node)


def _same_value(node: fx.Node) -> fx.Node | None:
    """The value that a view, or a view of a view, gives back unchanged; a view of a view is made one where it can
    be."""
    x = args_of(node)[0] if args_of(node) else None
    if not isinstance(x, fx.Node):
        return None
    if node.target is aten.t.default and x.target is aten.t.default:
        return args_of(x)[0]
    if node.target is aten.permute.default:
        order: list[int] = args_of(node)[1]
        if x.target is aten.permute.default:
            inner: list[int] = args_of(x)[1]
            order = [inner[dim] for dim in order]
            x = args_of(x)[0]
            node.args = (x, order)
        return x if order == sorted(order) else None
    if node.target in (aten.slice.Tensor, aten.slice_backward.default):
        # A slice that takes a whole dim, as `positions[:t]` does for the longest sequence.
        return x if x.meta["type"].shape == node.meta["type"].shape else None
    if node.target in (aten.view.default, aten._unsafe_view.default):
        if x.target in (aten.view.default, aten._unsafe_view.default):
            x = args_of(x)[0]
            node.args = (x, *args_of(node)[1:])
    elif node.target is not aten.expand.default:
        return None
    return x if x.meta["type"].shape == node.meta["type"].shape else None
