"""Values that kernels compute again, from a tensor that exists anyway, instead of storing them for each other.

A value that is made of one stored tensor by a little arithmetic with a number for each row (the logarithm of a softmax:
`x - max - log(sum)`) need not be stored itself: a reader in another kernel reads that tensor and the rows' numbers.
So a loss keeps the logits from forward to backward, and neither their softmax nor its logarithm.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from monarch.compiler.graph import SIZED, Graph, args_of, is_of_named_size, provenance, tensor_type
from monarch.compiler.kernels.lower.values import arguments, is_lowered, is_transparent, key_of
from monarch.compiler.symbols import example
from monarch.compiler.types import Layout, TensorType

aten = torch.ops.aten

CHEAP = {
    getattr(getattr(aten, name), overload)
    for name, overload in (
        *((name, "Tensor") for name in ("add", "sub", "mul", "div")),
        *(("neg", "default"), ("_to_copy", "default"), ("masked_fill", "Scalar")),
    )
}
"""Ops that cost less than to move their results."""

ROW = 8
"""How many times smaller than the tensor the other stored values must be."""

AGAIN = "again"
"""In the meta of a node: it is to be computed where its one reader is."""

NONE, MEAN = 0, 1
"""torch's numbers for a loss of each target, and for their mean."""


def compute_again(graph: Graph) -> set[fx.Node]:
    """Rewrite a partitioned graph so that kernels can leave values out that are cheap to compute again, and give the
    nodes that it has more than before: those that stand for no op of the program's. Nodes that are computed again are
    marked AGAIN.

        %l = aten._log_softmax(%x, 1, false)      : f32[64, 256]
        -->
        %m = aten.amax(%x, [1], true)             : f32[64, 1]
        %s = aten.log(%sum_of_exp)                : f32[64, 1]
        %l = aten.sub(aten.sub(%x, %m), %s)       : f32[64, 256]    # in forward, and once more in backward

    `aten.nll_loss_forward` of unweighted classes is taken apart too, for ATen's would need `%l` itself. The values keep
    their bits, but for the order in which a loss is summed.
    """
    return _Rewrite(graph).run()


@dataclass(frozen=True)
class _Place:
    """How many ops come before a node across which kernels do not reach, and whether it is backward's."""

    before: int
    backward: bool


@dataclass
class _Rewrite:
    graph: Graph
    places: dict[fx.Node, _Place] = field(default_factory=dict)
    instead: set[fx.Node] = field(default_factory=set)
    """The nodes that stand for an op which was taken apart, or moved."""

    def run(self) -> set[fx.Node]:
        there = set(self.graph.fx.nodes)
        for node in list(self.graph.calls):
            if node.target is aten.nll_loss_forward.default and not is_of_named_size(node) and self.is_plain_loss(node):
                self.take_loss_apart(node)
        self.places = self.find_places()
        for node in list(self.graph.calls):
            if node.target is aten._log_softmax.default and not is_of_named_size(node) and self.is_worth_parting(node):
                self.take_log_softmax_apart(node)
        self.places = self.find_places()
        for node in reversed(list(self.graph.calls)):
            if is_of_named_size(node) or not self.is_cheap(node):
                continue
            if self.are_apart(node, readers := list(self.readers(node))):
                self.move(node, readers, node in there or node in self.instead)
        return set(self.graph.fx.nodes) - there - self.instead

    # -- values that are computed again -----------------------------------------------------------------------------

    def find_places(self) -> dict[fx.Node, _Place]:
        found, before = {}, 0
        for node in self.graph.fx.nodes:
            found[node] = _Place(before, provenance(node).backward)
            before += node.op == "call_function" and not self.is_part_of_kernels(node)
        return found

    def is_part_of_kernels(self, node: fx.Node) -> bool:
        return node.target is operator.getitem or is_lowered(key_of(node))

    def readers(self, node: fx.Node) -> Iterator[list[fx.Node]]:
        """The readers of a value, each as the views through which it reads and itself at the end."""
        for user in node.users:
            if user.op == "call_function" and is_transparent(key_of(user)):
                for path in self.readers(user):
                    yield [user, *path]
            else:
                yield [user]

    def are_apart(self, node: fx.Node, readers: list[list[fx.Node]]) -> bool:
        """Whether all readers of a node can be in kernels, but not all in one with it."""
        ends = [path[-1] for path in readers]
        if not all(end.op == "call_function" and self.is_lowered(end) for end in ends):
            return False
        places = [self.places[end] for end in ends]
        return len(set(places)) > 1 or any(place.before != self.places[node].before for place in places)

    def is_lowered(self, node: fx.Node) -> bool:
        key = key_of(node)
        return is_lowered(key) and not is_transparent(key)

    def is_cheap(self, node: fx.Node) -> bool:
        """Whether a value is cheap arithmetic on one tensor that is stored anyway and on much smaller ones."""
        if node.target not in CHEAP:
            return False
        own = tensor_type(node)
        if node.target is aten._to_copy.default and not own.dtype.is_floating_point:
            return False
        size = example(own.numel)  # another size would do, at other costs
        large = [each for each in node.all_input_nodes if example(tensor_type(each).numel) * ROW > size]
        if len(large) != 1 or example(tensor_type(large[0]).numel) != size:
            return False
        if example(tensor_type(large[0]).nbytes) > example(own.nbytes):
            return False
        base = large[0]
        while is_transparent(key_of(base)) and base.all_input_nodes:
            base = base.all_input_nodes[0]
        if base.op == "placeholder" or not self.is_lowered(base):
            return not is_transparent(key_of(base))  # a constant is nowhere stored
        return self.is_cheap(base)

    def move(self, node: fx.Node, readers: list[list[fx.Node]], counts: bool) -> None:
        """Give each reader a copy of the node, and of the views between them, of its own, in place of the node."""
        for number, (*views, reader) in enumerate(readers):
            before, copy = node, self.copied(node, reader)
            if counts and not number:
                self.instead.add(copy)
            for view in views:
                made = self.copied(view, reader)
                made.replace_input_with(before, copy)
                before, copy = view, made
            reader.replace_input_with(before, copy)
        left = [view for path in sorted(readers, key=len, reverse=True) for view in reversed(path[:-1])]
        for each in (*dict.fromkeys(left), node):
            if not each.users:
                self.graph.fx.erase_node(each)

    def copied(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        with self.graph.fx.inserting_before(reader):
            copy = self.graph.fx.node_copy(node)
        copy.meta[AGAIN] = True
        copy.meta["provenance"] = replace(provenance(copy), backward=self.places[reader].backward)
        self.places[copy] = self.places[reader]
        return copy

    # -- ops that are taken apart -------------------------------------------------------------------------------------

    def is_plain_loss(self, node: fx.Node) -> bool:
        scores, target, weight = arguments(node, "self", "target", "weight")
        return (
            weight is None
            and scores.target is aten._log_softmax.default
            and tensor_type(scores).dtype in (torch.float32, torch.float64)
            and (tensor_type(scores).ndim, tensor_type(target).ndim) == (2, 1)
            and all(user.target is operator.getitem for user in node.users)
        )

    def take_loss_apart(self, node: fx.Node) -> None:
        """`-scores[target]` at each target but the ignored ones; their sum, or mean, and their count."""
        scores, target, reduction, ignore = arguments(node, "self", "target", "reduction", "ignore_index")
        total, count = node.meta["type"]
        labels, dtype = tensor_type(target), tensor_type(scores).dtype
        column = TensorType(labels.dtype, (*labels.shape, 1), Layout((*labels.layout.shards, ())))
        rows = TensorType(dtype, labels.shape, labels.layout)
        add = _Adder(self.graph, node)

        def valid() -> fx.Node:
            # Each reader has its own: one for all would be stored between kernels.
            return add(aten.ne.Scalar, target, ignore, type=TensorType(torch.bool, labels.shape, labels.layout))

        zero = add(aten.scalar_tensor.default, 0, dtype=labels.dtype, type=TensorType(labels.dtype, ()))
        index = add(aten.where.self, valid(), target, zero, type=labels)
        index = add(aten.unsqueeze.default, index, 1, type=column)
        found = add(aten.gather.default, scores, 1, index, type=TensorType(dtype, column.shape, column.layout))
        loss = add(aten.neg.default, add(aten.squeeze.dims, found, [1], type=rows), type=rows)
        zero = add(aten.scalar_tensor.default, 0, dtype=dtype, type=TensorType(dtype, ()))
        loss = add(aten.where.self, valid(), loss, zero, type=rows)
        number = add(aten.sum.default, valid(), type=TensorType(torch.int64, (), count.layout))
        number = add(aten._to_copy.default, number, dtype=count.dtype, type=count)
        if reduction != NONE:
            loss = add(aten.sum.default, loss, type=total)
        if reduction == MEAN:
            loss = add(aten.div.Tensor, loss, number, type=total)
        self.instead.add(loss)
        for user in list(node.users):
            result = (loss, number)[args_of(user)[1]]
            _hand_on(user, result)
            user.replace_all_uses_with(result)
            self.graph.fx.erase_node(user)
        self.graph.fx.erase_node(node)

    def is_worth_parting(self, node: fx.Node) -> bool:
        x, half = arguments(node, "self", "half_to_float")
        exact = not half and tensor_type(x).dtype in (torch.float32, torch.float64)
        return (
            exact
            and tensor_type(x).numel > 0
            and self.are_apart(node, [path for path in self.readers(node) if not _asks_for_shape(path[-1])])
        )

    def take_log_softmax_apart(self, node: fx.Node) -> None:
        x, dim = arguments(node, "self", "dim")
        whole = tensor_type(node)
        at = dim % whole.ndim
        shards = tuple(() if each == at else names for each, names in enumerate(whole.layout.shards))
        row = TensorType(
            whole.dtype, tuple(1 if each == at else size for each, size in enumerate(whole.shape)), Layout(shards)
        )
        for user in list(node.users):
            if _asks_for_shape(user):
                user.replace_input_with(node, x)
        add = _Adder(self.graph, node)
        most = add(aten.amax.default, x, [at], True, type=row)
        less = add(aten.sub.Tensor, x, most, type=whole)
        total = add(aten.sum.dim_IntList, add(aten.exp.default, less, type=whole), [at], True, type=row)
        made = add(aten.sub.Tensor, less, add(aten.log.default, total, type=row), type=whole)
        _hand_on(node, made)
        self.instead.add(made)
        node.replace_all_uses_with(made)
        self.graph.fx.erase_node(node)


def _asks_for_shape(node: fx.Node) -> bool:
    """Whether an op's result does not depend on the values of its scores."""
    return node.target is aten.nll_loss_backward.default


def _hand_on(node: fx.Node, made: fx.Node) -> None:
    """Facts in comments about a value hold for the one that takes its place."""
    made.meta.update(
        {name: node.meta[name] for name in ("key", "stands_for", "named", "decisions", SIZED) if name in node.meta}
    )


class _Adder:
    """Puts ops before a node that they stand for: they are called as it is in kernels' names, and are of its line."""

    def __init__(self, graph: Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, op: Any, *args: Any, type: TensorType, **kwargs: Any) -> fx.Node:
        with self.graph.fx.inserting_before(self.node):
            made = self.graph.call(op, *args, type=type, provenance=provenance(self.node), **kwargs)
        made.meta["part_of"] = key_of(self.node)
        return made
