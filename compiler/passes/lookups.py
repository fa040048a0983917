"""Do not sum values of which all but one term are known to be zero."""

from __future__ import annotations

from torch import fx, ops

from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, tensor_type
from monarch.compiler.ops.schema import is_view
from monarch.compiler.passes.simplify import erase_dead

aten = ops.aten

_ZEROS = {aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default}


class SimplifyLookups(Pass):
    """Rewrite the ops of a loss over classes where a mesh dim splits the classes, so that no sum crosses the mesh.

    %o = aten.scatter.value(%zeros, 1, %i, -1)  : f32[64, 256@model]    # %i and %w have one element a row
    %p = aten.mul.Tensor(%o, %w)                : f32[64, 256@model]
    %s = aten.sum.dim_IntList(%p, [1], true)    : f32[64, 1]
    -->
    %s = aten.mul.Tensor(%w, -1)                : f32[64, 1]
    """

    name = "simplify-lookups"

    def run(self, graph: Graph, context: Context) -> Graph:
        for node in list(graph.calls):
            if node.target is aten.sum.dim_IntList:
                _known_sum(graph, node)
        erase_dead(graph)
        return graph


def _known_sum(graph: Graph, node: fx.Node) -> None:
    product, dims, *keep = args_of(node)
    if not dims or keep != [True] or node.kwargs:
        return
    if _clears_padding(product, dims):
        product = args_of(product)[0]  # no index is in the padding
    if product.target is not aten.mul.Tensor:
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


def _clears_padding(node: fx.Node, dims: list[int]) -> bool:
    """Whether a call is what `PadForDivisibility` puts in front of a sum over a dim with padding."""
    if node.target is not aten.masked_fill.Scalar or len(dims) != 1:
        return False
    _, mask, fill = args_of(node)
    while is_view(mask.target):
        mask = args_of(mask)[0]
    type_, dim = tensor_type(node), dims[0]
    if fill != 0 or not any(type_.padding) or not type_.padding[dim] or mask.target is not aten.ge.Scalar:
        return False
    places, size = args_of(mask)
    return places.target is aten.arange.default and bool(size == type_.unpadded.shape[dim])
