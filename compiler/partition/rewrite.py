"""Write down the choice: local arguments, and a reshard wherever a reader wants a value in another layout."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, Provenance, args_of, provenance
from monarch.compiler.partition.choose import Choice
from monarch.compiler.partition.options import Options
from monarch.compiler.partition.whole import mark_gathered
from monarch.compiler.rules import PARTIAL, Strategy, localize, replace_operands
from monarch.compiler.types import VARYING, Placement, TensorType, is_partial

Place = tuple[Placement, str]
"""A placement, and for gathered state the phase ("forward" or "backward") it was gathered for, else ""."""


def rewrite(options: Options, choice: Choice) -> Graph:
    """The graph with every value laid out over the mesh dim as chosen."""
    return _Rewrite(options, choice).run()


@dataclass
class _Rewrite:
    """`at` says where each old value is at hand in the new graph, `several` the new ops with several results."""

    options: Options
    choice: Choice
    new: Graph = field(init=False)
    at: dict[fx.Node, dict[Place, fx.Node]] = field(default_factory=dict)
    several: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> Graph:
        graph, mesh_dim = self.options.graph, self.options.mesh_dim
        self.new = graph.empty_like()
        self.new.partitioned = (*graph.partitioned, mesh_dim)
        for node in graph.fx.nodes:
            if node.op == "placeholder":
                placement = node.meta["type"].layout.placement(mesh_dim)
                self.at[node] = {(placement, ""): self.new.fx.node_copy(node)}
            elif node.op == "call_function":
                self.call(node)
        self.output()
        return self.new

    def call(self, node: fx.Node) -> None:
        alternative = self.choice.alternatives[node]
        strategy = alternative.strategy
        type_ = node.meta["type"]
        if node.target is operator.getitem:
            producer = self.several[args_of(node)[0]]
            copy = self.copy(node, operator.getitem, (producer, args_of(node)[1]), {}, self.placed(type_, strategy))
        else:
            operands = self.options.operands[node]
            delivered = [
                self.deliver(operand, placement, node)
                for operand, placement in zip(operands, strategy.operands, strict=True)
            ]
            types = self.placed(type_, strategy)
            target, args, kwargs = self.localized(node, delivered, types, strategy)
            copy = self.copy(node, target, args, kwargs, types)
            if (rule := self.options.rules.get(node)) is not None and rule.reason:
                mark_gathered(copy, rule, self.moved(node))
        if not isinstance(type_, TensorType):
            self.several[node] = copy
            return
        gives = strategy.results[0]
        self.at[node] = {(gives, ""): copy}
        if alternative.after != gives:
            self.at[node][alternative.after, ""] = self.reshard(copy, gives, alternative.after, node, node)

    def moved(self, node: fx.Node) -> frozenset[int]:
        """Which operands of a call are not made replicated, by position."""

        def made(operand: fx.Node) -> Placement:
            alternative = self.choice.alternatives.get(operand)
            dim = self.options.mesh_dim
            return alternative.gives if alternative else operand.meta["type"].layout.placement(dim)

        operands = self.options.operands[node]
        return frozenset(at for at, operand in enumerate(operands) if made(operand) is not None)

    def placed(self, type_: Any, strategy: Strategy) -> Any:
        dim = self.options.mesh_dim
        if isinstance(type_, TensorType):
            return type_.place(dim, strategy.results[0])
        return tuple(t and t.place(dim, p) for t, p in zip(type_, strategy.results, strict=True))

    def localized(
        self, node: fx.Node, delivered: list[fx.Node], types: Any, strategy: Strategy
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op's target and arguments on this worker's shapes, with the delivered operands."""
        target, args, kwargs = node.target, args_of(node), node.kwargs
        if edge := self.options.edges.get(node):
            self.new.regions.update(edge.partitioned(strategy.operands, strategy.results))
        elif strategy.factor not in ("", PARTIAL) and node.target is not ops.constrain:
            shapes = [self.local_shape(copy.meta["type"]) for copy in delivered]
            results = [
                () if t is None else self.local_shape(t) for t in (types if isinstance(types, tuple) else (types,))
            ]
            target, args, kwargs = localize(node, shapes, results, strategy, self.options.mesh_dim, self.options.size)
        args, kwargs = replace_operands((args, dict(kwargs)), delivered)
        return target, args, kwargs

    def local_shape(self, type_: TensorType) -> tuple[int, ...]:
        return self.new.local_shape(type_)

    def copy(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> fx.Node:
        copy = self.new.append(target, args, kwargs, node.name)
        copy.meta.update(node.meta)
        copy.meta["type"] = types
        return copy

    def deliver(self, value: fx.Node, target: Placement, user: fx.Node) -> fx.Node:
        """The new value of `value` in placement `target`, resharded in front of `user` unless it is at hand."""
        at_hand = self.at[value]
        place: Place = (target, "")
        if value.op == "placeholder" and target is None and place not in at_hand:
            # A parameter gathered for the forward pass is gathered anew for the backward pass, not held in between.
            place = (None, "backward" if provenance(user).backward else "forward")
        if place not in at_hand:
            source, _ = min((p for p in at_hand if not p[1]), key=lambda p: _nearness(p[0]))
            at_hand[place] = self.reshard(at_hand[source, ""], source, target, value, user)
        return at_hand[place]

    def reshard(self, copy: fx.Node, source: Placement, target: Placement, value: fx.Node, user: fx.Node) -> fx.Node:
        """Append the op that brings `copy` from `source` to `target`; `value` and `user` are whom it is for."""
        dim = self.options.mesh_dim
        type_ = self.new.type_so_far(copy).place(dim, target)
        named = tuple((node.name, node.meta["key"]) for node in (value, user) if "key" in node.meta)
        taker, maker = provenance(user), provenance(value)
        of = Provenance(
            taker.source or maker.source,
            taker.module or maker.module,
            taker.backward,
            block=maker.block if taker.block is None else taker.block,
            microbatch=maker.microbatch if taker.microbatch is None else taker.microbatch,
            stage=maker.stage if taker.stage is None else taker.stage,
        )
        why = f"{_describe(value)} is {_words(source, dim)}; {_describe(user)} needs it {_words(target, dim)}"
        if user is value:
            why = f"{_describe(value)} is {_words(source, dim)}, and its users need it {_words(target, dim)}"

        def local(op: ops.MonarchOp, *args: Any, to: TensorType = type_) -> fx.Node:
            node = self.new.call(op, *args, type=to, provenance=of, name=f"{value.name}_{op.name}")
            node.meta.update(why=why, named=named)
            return node

        def collective(op: ops.MonarchOp, *args: Any) -> fx.Node:
            several = self.new.call(
                op, [copy], [dim], *args, type=(type_,), provenance=of, name=f"{value.name}_{op.name}"
            )
            node = self.new.call(operator.getitem, several, 0, type=type_, provenance=of)
            several.meta["why"] = node.meta["reason"] = why
            for each in (several, node):
                each.meta["named"] = named
            return node

        if target == VARYING:
            copy = copy if source is None else self.reshard(copy, source, None, value, user)
            return local(ops.to_varying, copy, dim, None)
        if isinstance(source, int):
            if target is None:
                return collective(ops.all_gather, [source])
            if isinstance(target, int):
                return collective(ops.all_to_all, [source], [target])
            copy = self.reshard(copy, source, None, value, user)
            return local(ops.first_only, copy, dim)
        if source is None:
            return local(ops.shard, copy, dim, target) if isinstance(target, int) else local(ops.first_only, copy, dim)
        if target is None:
            return collective(ops.all_reduce, source)
        return collective(ops.reduce_scatter, [target], source)

    def output(self) -> None:
        graph, dim = self.options.graph, self.options.mesh_dim
        output = graph.fx.output_node()
        states = graph.states

        def final(node: fx.Node) -> fx.Node:
            alternative = self.choice.alternatives.get(node)
            return self.at[node][alternative.after, ""] if alternative else next(iter(self.at[node].values()))

        updates = {}
        for label, node in graph.updates.items():
            if label in states:
                updates[label] = self.deliver(node, states[label].layout.placement(dim), output)
            else:
                updates[label] = final(node)
        self.new.output([node and final(node) for node in graph.returns], updates)


def _nearness(source: Placement) -> int:
    """Replicated values cost nothing to cut; sharded ones move less than pending sums."""
    return 0 if source is None else 2 if is_partial(source) else 1


def _describe(node: fx.Node) -> str:
    return "the program's result" if node.op == "output" else f"%{node.name}"


def _words(placement: Placement, dim: str) -> str:
    if placement is None:
        return f"replicated on '{dim}'"
    if placement == VARYING:
        return f"as a tensor of each worker's own along '{dim}'"
    return (
        f"a pending {placement} over '{dim}'"
        if isinstance(placement, str)
        else f"sharded on dim {placement} over '{dim}'"
    )
