"""Keep the batch dims of matrix products apart, so that each of them can be sharded.

PyTorch's `matmul` and `einsum` of four dims, and attention that models write by hand, view batch and heads as one dim,
call `bmm`, and view its result as two dims again. Blocks of such a dim are blocks of batches: heads, which come second
in it, cannot be sharded.

    %q = aten.view(%x, [8, 16, 4])        : f32[8, 16, 4]      # %x is f32[2, 4@model, 16, 4]
    %k = aten.view(%y, [8, 4, 16])        : f32[8, 4, 16]
    %s = aten.bmm(%q, %k)                 : f32[8, 16, 16]
    %r = aten.view(%s, [2, 4, 16, 16])    : f32[2, 4, 16, 16]
    -->
    %r = aten.matmul(%x, %y)              : f32[2, 4, 16, 16]

Ops between products (scales, masks, softmax, transposes) are kept apart with them.

Linear layers and losses do the same with batch and sequence, of which blocks of a sequence are shards of the lower one.
There the product of matrices is one with more rows, and that of a weight's gradient sums over two dims. Not where the
weight is sharded over the same mesh dim: one of the two is gathered then, and rows that are one dim say which, so that
shards of the weight are not gathered again and again, here, in the backward pass and with their gradients.

    %g = aten.view(%x, [32, 64])          : f32[32, 64]        # %x is f32[4, 8@seq, 64]
    %y = aten.mm(%g, %w)                  : f32[32, 16]
    %t = aten.permute(%d, [1, 0])         : f32[16, 32]        # %d views f32[4, 8@seq, 16] as [32, 16]
    %s = aten.mm(%t, %g)                  : f32[16, 64]
    -->
    %y = aten.matmul(%x, %w)              : f32[4, 8, 16]
    %s = aten.tensordot(%d, %x, [1, 2], [0, 1])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monarch.compiler.context import Context
from monarch.compiler.graph import Graph, args_of, provenance, tensor_type
from monarch.compiler.ops.record import find
from monarch.compiler.partition.options import Options
from monarch.compiler.passes.simplify import SimplifyViews
from monarch.compiler.rules import Line, replace_operands, rule_for, tensor_operands
from monarch.compiler.rules.call import Call
from monarch.compiler.rules.views import view_rule
from monarch.compiler.types import TensorType

aten = torch.ops.aten


def keep_all(graph: Graph) -> Graph:
    """The graph with all batch dims of its products apart, whatever is sharded. The argument is taken apart."""
    merged = find_merged(graph, rows=False)
    return SimplifyViews().run(graph, Context()) if merged.keep(lambda view: True) else graph


def keep_split(graph: Graph, options: Options) -> bool:
    """Keep dims apart that views merge for products and sums where a layout shards the lower of them; whether there
    are any."""
    split = find_split(graph, options)
    kept = bool(split) and find_merged(graph, rows=True).keep(
        lambda view: view in split,
        lambda weight: any(
            direct and isinstance(placement, int) for placement, direct in options.reach[weight][0].items()
        ),
    )
    if kept:
        SimplifyViews().run(graph, Context())
    return kept


def find_split(graph: Graph, options: Options) -> set[fx.Node]:
    """The views that merge dims of which a layout shards a lower one."""
    merges = ((node, _merge(node)) for node in graph.calls)
    return {node for node, found in merges if found is not None and _is_split(options, *found[1:])}


def _is_split(options: Options, value: fx.Node, dims: Sequence[int]) -> bool:
    return any(direct and placement in dims for placement, direct in options.reach[value][0].items())


@dataclass(frozen=True)
class _Several:
    """A value's dim `at` that is several, of these sizes, outermost first."""

    at: int
    sizes: tuple[int, ...]

    def apart(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape with the several dims in the place of the one."""
        return (*shape[: self.at], *self.sizes, *shape[self.at + 1 :])

    def ones(self, at: int, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape with as many dims of one element in the place of its dim `at`, which has one."""
        return (*shape[:at], *(1 for _ in self.sizes), *shape[at + 1 :])

    def moved(self, dim: int, ndim: int) -> int:
        """Where a dim of the value is then; the first of the several for the one."""
        dim %= ndim
        return dim if dim <= self.at else dim + len(self.sizes) - 1

    def all_moved(self, dims: Sequence[int], ndim: int) -> list[int]:
        """Where dims of the value are then, the one being all of the several."""
        counts = [len(self.sizes) if dim % ndim == self.at else 1 for dim in dims]
        return [self.moved(dim, ndim) + i for dim, count in zip(dims, counts, strict=True) for i in range(count)]


@dataclass
class Merged:
    """The values with a dim that views have merged of several, and how they come to each other.

    `several`   these values, operands before what reads them; and the calls that reduce the merged dim of an operand,
                with what that operand has
    `places`    for each call among them, the dim of each operand that is the merged one; None where it has none
    `sources`   for each that merges dims: the value before
    `wanting`   the calls for which dims are kept apart
    `reduced`   the calls whose result has none of the merged dims
    """

    graph: Graph
    several: dict[fx.Node, _Several] = field(default_factory=dict)
    places: dict[fx.Node, list[int | None]] = field(default_factory=dict)
    sources: dict[fx.Node, fx.Node] = field(default_factory=dict)
    wanting: set[fx.Node] = field(default_factory=set)
    reduced: set[fx.Node] = field(default_factory=set)

    def joined(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a call that are merged as it is."""
        sizes = self.several[node].sizes
        return [
            operand
            for operand, at in zip(tensor_operands(node), self.places[node], strict=True)
            if at is not None and operand not in self.reduced and self.several.get(operand) == _Several(at, sizes)
        ]

    def keep(
        self, is_split: Callable[[fx.Node], bool], is_sharded: Callable[[fx.Node], bool] = lambda weight: False
    ) -> bool:
        """Take apart the merged values that have to do with a call that wants it and with a source that `is_split`,
        and with no weight that `is_sharded`; whether there are any. The merged values stand beside them, as views, for
        other readers."""
        groups: dict[fx.Node, set[fx.Node]] = {}
        for node in self.several:
            group = {node}
            for operand in self.joined(node) if node in self.places else ():
                group |= groups[operand]
            groups.update(dict.fromkeys(group, group))
        split = set(filter(is_split, self.sources))
        chosen = {
            id(group)
            for group in {id(group): group for group in groups.values()}.values()
            if not group.isdisjoint(self.wanting)
            and not group.isdisjoint(split)
            and not any(is_sharded(weight) for node in group for weight in self._weights(node))
        }
        apart: dict[fx.Node, fx.Node] = {}
        for node in self.several:
            if id(groups[node]) in chosen:
                with self.graph.fx.inserting_before(node):
                    apart[node] = (self._reduction if node in self.reduced else self._apart)(node, apart)
        for node, made in apart.items():
            with self.graph.fx.inserting_before(node):
                node.replace_all_uses_with(self._view(node, made, tensor_type(node).shape))
        return bool(apart)

    def _weights(self, node: fx.Node) -> list[fx.Node]:
        """The factor of rows in a product."""
        if node.target not in _OF_ROWS:
            return []
        return [tensor_operands(node)[-1]] if self.places[node][-1] is None else []

    def _call(self, node: fx.Node, shape: Sequence[int], op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call in the place of `node`."""
        made = self.graph.call(op, *args, type=None, **kwargs)
        made.meta.update(node.meta)
        made.meta["type"] = TensorType(tensor_type(node).dtype, tuple(shape))
        return made

    def _apart(self, node: fx.Node, apart: dict[fx.Node, fx.Node]) -> fx.Node:
        """A merged value with its dims apart; `apart` are those of the values before it."""
        several, type_ = self.several[node], tensor_type(node)
        shape = several.apart(type_.shape)
        if node in self.sources:
            source = self.sources[node]
            if node.target is aten.repeat.default:
                ones = list(shape)
                ones[several.at] = 1
                source = self._view(node, source, ones)
                return self._call(node, shape, aten.expand.default, source, list(shape))
            return self._call(node, shape, aten.view.default, source, list(shape))
        places = self.places[node]
        operands, args, kwargs = self._operands(node, apart)
        if node.target in (aten.bmm.default, aten.mm.default):
            return self._call(node, shape, aten.matmul.default, *args)
        if node.target in (aten.baddbmm.default, aten.addmm.default):
            return self._added(node, shape, args, kwargs)
        if node.target in _RESHAPES:
            target = node.target if node.target is aten.expand.default else aten.view.default
            return self._call(node, shape, target, args[0], list(shape))
        if (name := _DIMS.get(node.target)) is not None:
            call = Call.of(node, lambda value: tensor_type(value).shape)
            before, ndim = _Several(next(at for at in places if at is not None), several.sizes), len(call.shapes[0])
            dims = call[name]
            moved = before.moved(dims, ndim) if isinstance(dims, int) else before.all_moved(dims, ndim)
            _, args, kwargs = call.replace(**{name: moved})
            args, kwargs = replace_operands((args, kwargs), operands)
        return self._call(node, shape, node.target, *args, **kwargs)

    def _reduction(self, node: fx.Node, apart: dict[fx.Node, fx.Node]) -> fx.Node:
        """A call that reduces the merged dim, over all of the several."""
        several, type_ = self.several[node], tensor_type(node)
        operands, args, kwargs = self._operands(node, apart)
        if node.target is aten.mm.default:
            left, right = ([*range(at, at + len(several.sizes))] for at in (1, 0))
            return self._call(node, type_.shape, aten.tensordot.default, *args, left, right)
        call = Call.of(node, lambda value: tensor_type(value).shape)
        if call.signature is None or "dim" not in call.signature.at:
            return self._call(node, type_.shape, node.target, *args, **kwargs)
        dims = several.all_moved(call["dim"] or [*range(len(call.shapes[0]))], len(call.shapes[0]))
        _, args, kwargs = call.replace(dim=dims, keepdim=False)
        args, kwargs = replace_operands((args, kwargs), operands)
        left_out = {dim % tensor_type(operands[0]).ndim for dim in dims}
        shape = [size for dim, size in enumerate(tensor_type(operands[0]).shape) if dim not in left_out]
        return self._view(node, self._call(node, shape, node.target, *args, **kwargs), type_.shape)

    def _operands(
        self, node: fx.Node, apart: dict[fx.Node, fx.Node]
    ) -> tuple[list[fx.Node], tuple[Any, ...], dict[str, Any]]:
        """The operands of a call with their dims apart, and its arguments with these."""
        places = zip(tensor_operands(node), self.places[node], strict=True)
        operands = [self._operand(node, operand, at, apart) for operand, at in places]
        args, kwargs = replace_operands((args_of(node), dict(node.kwargs)), operands)
        return operands, args, kwargs

    def _operand(self, node: fx.Node, operand: fx.Node, at: int | None, apart: dict[fx.Node, fx.Node]) -> fx.Node:
        """An operand of a call with its dims apart."""
        several, shape = self.several[node], tensor_type(operand).shape
        if at is None:  # it is broadcast along the dim: its dims on the left have to stay on the left
            at = several.at - (tensor_type(node).ndim - len(shape))
            return operand if at <= 0 else self._view(node, operand, several.ones(at, shape))
        own = _Several(at, several.sizes)
        if operand in apart and self.several[operand] == own:
            return apart[operand]
        if operand.target is aten.full.default:  # as which it can be born in shards; a view of it could not
            filled = self._view(node, operand, own.apart(shape))
            filled.target, filled.kwargs = aten.full.default, dict(operand.kwargs)
            filled.args = (list(own.apart(shape)), *args_of(operand)[1:])
            return filled
        if operand.target is aten.expand.default:
            source = args_of(operand)[0]
            inner = tensor_type(source).shape
            if len(inner) == len(shape) and inner[at] == 1:
                one = self._view(node, source, own.ones(at, inner))
                made = self._view(node, one, own.apart(shape))
                made.target = aten.expand.default
                return made
        return self._view(node, operand, own.apart(shape))

    def _view(self, node: fx.Node, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A view of an operand, for `node`."""
        type_ = TensorType(tensor_type(value).dtype, tuple(shape))
        return self.graph.call(aten.view.default, value, list(shape), type=type_, provenance=provenance(node))

    def _added(self, node: fx.Node, shape: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """`baddbmm` or `addmm` as a product and a sum, or as a linear layer."""
        added, left, right = args
        if not kwargs and tensor_type(added).ndim == 1 and right.target is aten.permute.default:
            return self._call(node, shape, aten.linear.default, left, args_of(right)[0], added)
        found = self._call(node, shape, aten.matmul.default, left, right)
        if (alpha := kwargs.get("alpha", 1)) != 1:
            found = self._call(node, shape, aten.mul.Tensor, found, alpha)
        if (beta := kwargs.get("beta", 1)) == 0:
            return found
        return self._call(node, shape, aten.add.Tensor, found, added, **({} if beta == 1 else {"alpha": beta}))


_DIMS: dict[Any, str] = {
    aten._softmax.default: "dim",
    aten._softmax_backward_data.default: "dim",
    aten._log_softmax.default: "dim",
    aten._log_softmax_backward_data.default: "dim",
    aten.gather.default: "dim",
    aten.scatter_add.default: "dim",
    aten.sum.dim_IntList: "dim",
    aten.mean.dim: "dim",
    aten.amax.default: "dim",
    aten.slice.Tensor: "dim",
    aten.cat.default: "dim",
    aten.permute.default: "dims",
    aten.scatter.value: "dim",
}
"""Ops between products that name dims, and the argument that does. Pointwise ops name none."""
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
_OF_ROWS = (aten.mm.default, aten.addmm.default)
_BY_ROWS = (aten.embedding.default, aten.zeros_like.default)
"""Ops beside pointwise ones that name no dim, and compute each row of the merged dim from itself."""
_REDUCTIONS = (
    aten.mm.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.amax.default,
    aten.embedding_dense_backward.default,
)


def find_merged(graph: Graph, *, rows: bool) -> Merged:
    """The values of a graph that hold several dims as one, from the views that merge them on. With `rows` these are
    the rows of matrices too, and all that is computed from these; otherwise they are kept apart for batched products
    alone."""
    found = Merged(graph)
    products = (*_PRODUCTS, *_OF_ROWS) if rows else _PRODUCTS
    if not rows and not any(node.target in _PRODUCTS for node in graph.calls):
        return found
    for node in graph.calls:
        if not isinstance(node.meta["type"], TensorType) or any(tensor_type(node).padding):
            continue
        carried = _carried(found, node, products)
        if carried is not None:
            found.several[node], found.places[node] = carried
            if rows or node.target in products:
                found.wanting.add(node)
        elif rows and (reduced := _reduced(found, node)) is not None:
            found.several[node], found.places[node] = reduced
            found.reduced.add(node)
            found.wanting.add(node)
        elif (merge := _merge(node)) is not None:
            found.several[node], found.sources[node] = merge[:2]
    return found


def _merge(node: fx.Node) -> tuple[_Several, fx.Node, tuple[int, ...]] | None:
    """The dim that a view or `repeat` merges: its number, the value before, and its dims that could be sharded there
    and not here."""
    if node.target is aten.repeat.default:
        source, times = args_of(node)[:2]
        shape = tensor_type(source).shape
        dims = [dim for dim, count in enumerate(times) if count != 1]
        if len(times) != len(shape) or len(dims) != 1 or shape[dims[0]] == 1:
            return None
        return _Several(dims[0], (times[dims[0]], shape[dims[0]])), source, (dims[0],)
    if node.target not in (aten.view.default, aten._unsafe_view.default):
        return None
    source = args_of(node)[0]
    rule = view_rule(tensor_type(source).shape, tensor_type(node).shape)
    made = rule.results[0] or ()
    for at, factors in enumerate(made):
        factors = tuple(name for name in factors if rule.sizes[name] != 1)
        if len(factors) < 2 or rule.whole & {*factors}:
            continue
        leads = [at for at, dim in enumerate(rule.operands[0]) if rule.leader(dim) in factors[1:]]
        if leads:
            return _Several(at, tuple(rule.sizes[name] for name in factors)), source, tuple(leads)
    return None


def _carried(merged: Merged, node: fx.Node, products: Sequence[Any]) -> tuple[_Several, list[int | None]] | None:
    """The merged dim that a call's result has from an operand, and where each operand has it: along it the op keeps
    all elements apart."""
    if node.target not in (*products, *_RESHAPES, *_DIMS, *_BY_ROWS) and not _is_pointwise(node):
        return None
    for several, made, held in _followed(merged, node):
        if node.target in _DIMS and None in held:
            continue  # what is looked up along the merged dim, by an index that has it, is not broadcast along it
        # Rows and columns of batched matrices stay one dim, and so do columns of others.
        if made is not None and made >= 0 and (node.target not in products or made == 0):
            return _Several(made, several.sizes), held
    return None


def _reduced(merged: Merged, node: fx.Node) -> tuple[_Several, list[int | None]] | None:
    """The merged dim of an operand over which a call sums, and where each operand has it."""
    if node.target not in _REDUCTIONS:
        return None
    for several, made, held in _followed(merged, node):
        if made is None:
            return several, held
    return None


def _followed(merged: Merged, node: fx.Node) -> Iterator[tuple[_Several, int | None, list[int | None]]]:
    """The merged dims of a call's operands: where the result has each (see `_place`), and each operand."""
    for number, operand in enumerate(tensor_operands(node)):
        several = merged.several.get(operand)
        if several is None or operand in merged.reduced:
            continue
        rule = rule_for(node, lambda value: tensor_type(value).shape)
        factor = rule.operands[number][several.at]
        if len(factor) != 1 or factor[0] in rule.whole:
            continue
        held = [_place(dims, factor) for dims in rule.operands]
        if all(at is None or at >= 0 for at in held):
            yield several, _place(rule.results[0] or (), factor), held


def _place(dims: Sequence[tuple[str, ...]], factor: tuple[str, ...]) -> int | None:
    """The dim that is this factor; None where there is none, -1 where it is part of one, or several are."""
    at = [index for index, dim in enumerate(dims) if factor[0] in dim]
    if not at:
        return None
    return at[0] if len(at) == 1 and dims[at[0]] == factor else -1


def _is_pointwise(node: fx.Node) -> bool:
    rule = find(node.target, "rule")
    if node.target in (aten.div.Tensor, aten.div.Tensor_mode):
        return True
    return isinstance(rule, Line) and {*rule.text.replace("->", ",").replace(" ", "").split(",")} == {"..."}
