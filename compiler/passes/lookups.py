"""Look up before computing, and do not sum what is known to have one term."""

from __future__ import annotations

from dataclasses import replace

from torch import fx, ops

from monarch.compiler.graph import Graph, args_of, tensor_type
from monarch.compiler.passes.base import Pass

aten = ops.aten

_POINTWISE = {aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor}
_ZEROS = {aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default}


class SimplifyLookups(Pass):
    """Rewrite what a loss over classes leaves where a mesh dim splits the classes, so that no value of their shape is
    made for it, and no sum crosses the mesh.

    %d = aten.sub.Tensor(%x, %m)                : f32[64, 256@model]    # %m has one element a row
    %y = aten.gather(%d, 1, %i)                 : f32[64, 1]
    -->
    %g = aten.gather(%x, 1, %i)                 : f32[64, 1]
    %y = aten.sub.Tensor(%g, %m)                : f32[64, 1]

    %o = aten.scatter.value(%zeros, 1, %i, -1)  : f32[64, 256@model]    # %i and %w have one element a row
    %p = aten.mul.Tensor(%o, %w)                : f32[64, 256@model]
    %s = aten.sum.dim_IntList(%p, [1], true)    : f32[64, 1]
    -->
    %s = aten.mul.Tensor(%w, -1)                : f32[64, 1]
    """

    name = "simplify-lookups"

    def run(self, graph: Graph) -> Graph:
        for node in list(graph.calls):
            if node.target is aten.gather.default:
                while (made := _looked_up_first(graph, node)) is not None:
                    node = made
            elif node.target is aten.sum.dim_IntList:
                _known_sum(graph, node)
        graph.fx.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        return graph


def _looked_up_first(graph: Graph, gather: fx.Node) -> fx.Node | None:
    """The new gather, whose operand is that of the pointwise op which the old one looked up in."""
    source, dim, index = args_of(gather)[:3]
    if not (source.target is aten._to_copy.default or _is_with_rows(source, dim, tensor_type(index).shape)):
        return None
    x, *rows = args_of(source)
    type_ = tensor_type(gather)
    with graph.fx.inserting_before(gather):
        found = graph.call(aten.gather.default, x, dim, index, type=replace(type_, dtype=tensor_type(x).dtype))
        made = graph.call(source.target, found, *rows, type=type_, **source.kwargs)
    found.meta.update({name: value for name, value in gather.meta.items() if name not in ("type", "key", "traced")})
    made.meta.update(gather.meta)
    gather.replace_all_uses_with(made)
    graph.fx.erase_node(gather)
    return found


def _is_with_rows(node: fx.Node, dim: int, looked: tuple[int, ...]) -> bool:
    """Whether an op computes with a tensor and, as its second operand, what a gather of shape `looked` leaves be."""
    if node.target not in _POINTWISE or node.kwargs or not all(isinstance(each, fx.Node) for each in args_of(node)):
        return False
    whole, row = map(tensor_type, args_of(node))
    same = (whole.dtype, whole.shape) == (tensor_type(node).dtype, tensor_type(node).shape)
    return same and row.shape == looked and bool(looked) and looked[dim] == 1


def _known_sum(graph: Graph, node: fx.Node) -> None:
    product, dims, *keep = args_of(node)
    if keep != [True] or node.kwargs or product.target is not aten.mul.Tensor:
        return
    one_hot, factor = args_of(product)
    if not isinstance(factor, fx.Node) or one_hot.target is not aten.scatter.value:
        return
    zeros, dim, index, value = args_of(one_hot)
    rows = tensor_type(node)
    ndim = rows.ndim
    if zeros.target not in _ZEROS or [each % ndim for each in dims] != [dim % ndim]:
        return
    if tensor_type(factor) != rows or tensor_type(index).shape != rows.shape:
        return
    with graph.fx.inserting_before(node):
        made = graph.call(aten.mul.Tensor, factor, value, type=rows)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.fx.erase_node(node)
