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

What lies between products (scales, masks, softmax, transposes) is kept apart with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    merged = find_merged(graph)
    return SimplifyViews().run(graph, Context()) if merged.keep(lambda value, dims: True) else graph


def keep_split(graph: Graph, options: Options) -> bool:
    """Keep the batch dims of products apart where a layout shards one that views merge below another; whether there
    are any."""

    def is_split(value: fx.Node, dims: Sequence[int]) -> bool:
        return any(direct and placement in dims for placement, direct in options.reach[value][0].items())

    kept = find_merged(graph).keep(is_split)
    if kept:
        SimplifyViews().run(graph, Context())
    return kept


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

    `several`   these values, operands before what reads them
    `places`    for each call among them, the dim of each operand that is the merged one; None where it has none
    `sources`   for each that merges dims: the value before, and which dims of it come to lie below another
    `products`  the products among them
    """

    graph: Graph
    several: dict[fx.Node, _Several] = field(default_factory=dict)
    places: dict[fx.Node, list[int | None]] = field(default_factory=dict)
    sources: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = field(default_factory=dict)
    products: list[fx.Node] = field(default_factory=list)

    def joined(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a call that are merged as it is."""
        sizes = self.several[node].sizes
        return [
            operand
            for operand, at in zip(tensor_operands(node), self.places[node], strict=True)
            if at is not None and self.several.get(operand) == _Several(at, sizes)
        ]

    def keep(self, is_split: Callable[[fx.Node, Sequence[int]], bool]) -> bool:
        """Take apart the merged values that have to do with a product and with a source that `is_split`; whether there
        are any. The merged values stand beside them, as views, for other readers."""
        groups: dict[fx.Node, set[fx.Node]] = {}
        for node in self.several:
            group = {node}
            for operand in self.joined(node) if node in self.places else ():
                group |= groups[operand]
            groups.update(dict.fromkeys(group, group))
        chosen = {
            id(group)
            for group in groups.values()
            if any(product in group for product in self.products)
            and any(node in group and is_split(*source) for node, source in self.sources.items())
        }
        apart: dict[fx.Node, fx.Node] = {}
        for node in self.several:
            if id(groups[node]) in chosen:
                with self.graph.fx.inserting_before(node):
                    apart[node] = self._apart(node, apart)
        for node, made in apart.items():
            with self.graph.fx.inserting_before(node):
                node.replace_all_uses_with(self._view(node, made, tensor_type(node).shape))
        return bool(apart)

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
            source = self.sources[node][0]
            if node.target is aten.repeat.default:
                ones = list(shape)
                ones[several.at] = 1
                source = self._view(node, source, ones)
                return self._call(node, shape, aten.expand.default, source, list(shape))
            return self._call(node, shape, aten.view.default, source, list(shape))
        places = self.places[node]
        operands = [
            self._operand(node, operand, at, apart) for operand, at in zip(tensor_operands(node), places, strict=True)
        ]
        args, kwargs = replace_operands((args_of(node), dict(node.kwargs)), operands)
        if node.target is aten.bmm.default:
            return self._call(node, shape, aten.matmul.default, *args)
        if node.target is aten.baddbmm.default:
            return self._added(node, shape, args, kwargs)
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
            return self._call(node, shape, node.target, args[0], list(shape))
        if (name := _DIMS.get(node.target)) is not None:
            call = Call.of(node, lambda value: tensor_type(value).shape)
            before, ndim = _Several(next(at for at in places if at is not None), several.sizes), len(call.shapes[0])
            dims = call[name]
            moved = before.moved(dims, ndim) if isinstance(dims, int) else before.all_moved(dims, ndim)
            _, args, kwargs = call.replace(**{name: moved})
            args, kwargs = replace_operands((args, kwargs), operands)
        return self._call(node, shape, node.target, *args, **kwargs)

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
        """`baddbmm` as a product and a sum."""
        added, left, right = args
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
}
"""Ops between products that name dims, and the argument that does. Pointwise ops name none."""
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)


def find_merged(graph: Graph) -> Merged:
    """The values of a graph that hold several dims as one, from the views that merge them on."""
    found = Merged(graph)
    if not any(node.target in _PRODUCTS for node in graph.calls):
        return found
    for node in graph.calls:
        if not isinstance(node.meta["type"], TensorType) or any(tensor_type(node).padding):
            continue
        carried = _carried(found, node)
        if carried is not None:
            found.several[node], found.places[node] = carried
            if node.target in _PRODUCTS:
                found.products.append(node)
        elif (merge := _merge(node)) is not None:
            several, source, lower = merge
            found.several[node], found.sources[node] = several, (source, lower)
    return found


def _merge(node: fx.Node) -> tuple[_Several, fx.Node, tuple[int, ...]] | None:
    """What a view or `repeat` merges to one dim: the dim, the value before, and its dims that could be sharded there
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


def _carried(merged: Merged, node: fx.Node) -> tuple[_Several, list[int | None]] | None:
    """The merged dim that a call's result has from an operand, and where each operand has it: along it the op keeps
    all elements apart."""
    operands = tensor_operands(node)
    if node.target not in (*_PRODUCTS, *_RESHAPES, *_DIMS) and not _is_pointwise(node):
        return None
    for number, operand in enumerate(operands):
        several = merged.several.get(operand)
        if several is None:
            continue
        rule = rule_for(node, lambda value: tensor_type(value).shape)
        factor = rule.operands[number][several.at]
        if len(factor) != 1 or factor[0] in rule.whole:
            continue
        held = [_place(dims, factor) for dims in rule.operands]
        made = _place(rule.results[0] or (), factor)
        if made is None or made < 0 or any(at is not None and at < 0 for at in held):
            continue
        if node.target not in _PRODUCTS or made == 0:  # rows and columns of matrices stay one dim
            return _Several(made, several.sizes), held
    return None


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
