"""Sizes that a mesh dim does not divide: padding is put in before the graph is partitioned.

All that comes behind works on sizes that divide; `TensorType.padding` says how much of them is padding. In what
programs take and give, and in state, padding holds zeros. In between it holds whatever an op made of it, and each op
that would let that into another element has it overwritten first (`monarch.compiler.rules.padding`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, provenance, tensor_type
from monarch.compiler.ops.record import find
from monarch.compiler.ops.regions import each_region
from monarch.compiler.ops.schema import is_view
from monarch.compiler.passes.decompose import composites, inline, is_composite
from monarch.compiler.passes.drop_padding import resized
from monarch.compiler.passes.simplify import erase_dead
from monarch.compiler.rules import LocalCall, Rule, Strategy, localize, replace_operands, rule_for, tensor_operands
from monarch.compiler.rules.call import Call, dims_of, result_types
from monarch.compiler.rules.localize import Localized
from monarch.compiler.rules.padding import LOOKUPS, UNREAD, Fill, Needs, is_reduced, needs_of
from monarch.compiler.text import parse_layout
from monarch.compiler.types import Layout, TensorType

aten = torch.ops.aten

Shape = tuple[int, ...]
MeshDims = frozenset[str]
NONE: MeshDims = frozenset()

_KEEP_ZERO = {
    getattr(aten, name)
    for name in "add sub mul neg clone _to_copy alias detach copy lerp addcmul cat stack sum mean".split()
}
"""Ops that give 0 where all operands are 0, if their rule says that they are linear."""

_MADE = {
    getattr(aten, name)
    for name in "full zeros ones empty new_full new_zeros new_ones new_empty expand embedding_dense_backward".split()
}
"""Ops that make a dim from a number among their arguments, and so make a larger one as well."""


_REDUCTIONS = {getattr(aten, name) for name in "sum mean amax amin max min any all prod".split()}


def is_uneven(graph: Graph) -> bool:
    """Whether a layout of the user's shards a dim into blocks that do not divide it."""
    if any(tensor_type(node).padded(graph.mesh).padding for node in graph.placeholders):
        return True
    return any(
        tensor_type(node).with_layout(parse_layout(args_of(node)[1])).padded(graph.mesh).padding
        for node in graph.calls
        if node.target is ops.constrain
    )


class PadForDivisibility(Pass):
    """Pad each dim that a layout shards unevenly, and all that is computed along it, up to equal blocks.

    %x = input 0                                : f32[10@data, 8]       # data=4
    %s = aten.sum.dim_IntList(%x, [1])          : f32[10]
    %e = aten.exp(%s)                           : f32[10]
    %t = aten.sum(%e)                           : f32[]
    -->
    %i = aten.arange(12)                        : i64[10+2]
    %m = aten.ge.Scalar(%i, 10)                 : bool[10+2]
    %x = input 0                                : f32[10+2@data, 8]
    %s = aten.sum.dim_IntList(%x, [1])          : f32[10+2]
    %e = aten.exp(%s)                           : f32[10+2]
    %f = aten.masked_fill.Scalar(%e, %m, 0.0)   : f32[10+2]
    %t = aten.sum(%f)                           : f32[]
    """

    name = "pad-for-divisibility"
    regions = "own"

    def run(self, graph: Graph, context: Context) -> Graph:
        return self.padded(graph, is_region=False)

    def padded(self, graph: Graph, *, is_region: bool) -> Graph:
        each_region(graph, lambda region: self.padded(region, is_region=True))
        _Pad(graph, is_region).run()
        erase_dead(graph)
        return graph


class _Pad:
    """`zero` holds the (value, dim)s whose padding is zero; `over` for each value, by dim, the mesh dims that its
    operands bring there; `weights` the states, and values of states alone; `needs` the needs of each call."""

    def __init__(self, graph: Graph, is_region: bool) -> None:
        self.graph = graph
        self.is_region = is_region
        self.mesh = graph.mesh
        self.zero: set[tuple[fx.Node, int]] = set()
        self.over: dict[fx.Node, tuple[MeshDims, ...]] = {}
        self.parts: dict[fx.Node, list[tuple[MeshDims, ...]]] = {}
        self.weights: set[fx.Node] = set()
        self.needs: dict[fx.Node, Needs] = {}
        self.known: dict[tuple[object, ...], fx.Node] = {}
        self.larger: dict[fx.Node, fx.Node] = {}  # the padded value in the place of each value

    def run(self) -> None:
        output = self.graph.fx.output_node()
        for node in self.graph.placeholders:
            self.placeholder(node)
        node = next(iter(self.graph.fx.nodes), output)
        while node is not output:
            before = node.prev
            if node.op == "call_function" and not self.call(node):
                node = before  # it was taken apart: its parts stand in its place
            node = node.next
        self.output(output)

    def placeholder(self, node: fx.Node) -> None:
        type_ = tensor_type(node).padded(self.mesh)
        node.meta["type"] = type_
        self.zero.update((node, dim) for dim in range(type_.ndim))
        self.over[node] = tuple(map(frozenset, type_.layout.shards))
        if node.meta["kind"] == "state":
            self.weights.add(node)

    def output(self, output: fx.Node) -> None:
        """Results and new state hold zeros in their padding, state in the sizes that it had. No padding leaves a
        region."""
        states = self.graph.states
        updates = {}
        for label, node in self.graph.updates.items():
            for dim, size in enumerate(states[label].shape if label in states else ()):
                node = self.resized(node, dim, size, output)
            if label not in states:
                node = self.larger.get(node, node)  # else both would be computed
            updates[label] = self.zeroed(node, output)
        ended = self.unpadded if self.is_region else self.zeroed
        self.graph.set_output([node and ended(node, output) for node in self.graph.returns], updates)

    def unpadded(self, node: fx.Node, before: fx.Node) -> fx.Node:
        for dim in _padded_dims(tensor_type(node)):
            node = self.resized(node, dim, _size(node, dim), before)
        return node

    def zeroed(self, node: fx.Node, before: fx.Node) -> fx.Node:
        for dim in _padded_dims(tensor_type(node)):
            node = self.filled(node, dim, 0.0, before)
        return node

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, node: fx.Node) -> bool:
        """Let a call take operands with padding. False where it was taken apart instead."""
        if node.target is operator.getitem:
            producer, index = args_of(node)
            node.meta["type"] = producer.meta["type"][index]
            self.over[node] = self.parts[producer][index]
            self.note(node, producer, index)
            return True
        if node.target is ops.constrain:
            self.constrain(node)
            return True
        if node.target is ops.recv:
            self.received(node)
            return True
        operands = tensor_operands(node)
        call = Call.of(node, _unpadded)
        needs = needs_of(call, rule_for(node, _unpadded))
        if self.is_split(node, operands, needs):
            inline(self.graph, node, unpadded=True)
            return False
        self.needs[node] = needs
        over = self.sharding(operands, needs.rule)
        sizes = self.sizes(operands, needs, over)
        if getattr(node.target, "overloadpacket", None) not in UNREAD or sizes:
            taken = self.operands(node, operands, needs, sizes)
            self.rewrite(node, taken, needs, sizes)
        self.follow(node, needs.rule, over)
        return True

    def is_split(self, node: fx.Node, operands: list[fx.Node], needs: Needs) -> bool:
        """Whether a composite op needs the whole of a dim that has padding, and not for want of a gathered weight."""
        return is_composite(node) and any(
            needs.rule.leader(needs.rule.operands[at][dim]) not in needs.fills and _size(operand, dim) > 1
            for at, operand in enumerate(operands)
            if operand not in self.weights
            for dim in _padded_dims(tensor_type(operand))
        )

    def sharding(self, operands: list[fx.Node], rule: Rule) -> dict[str, MeshDims]:
        """The mesh dims that shard each factor. A weight is gathered from a mesh dim that shards another factor of its
        other operand, as a fully sharded parameter is."""
        over: dict[str, MeshDims] = {}
        activations = [at for at, operand in enumerate(operands) if operand not in self.weights]
        for at in (*activations, *(at for at in range(len(operands)) if at not in activations)):
            of_others = dict(over) if at not in activations and activations else {}
            for dim, mesh_dims in zip(rule.operands[at], self.over[operands[at]], strict=True):
                factor = rule.leader(dim)
                used = NONE.union(*(found for other, found in of_others.items() if other != factor))
                if factor:
                    over[factor] = over.get(factor, NONE) | (mesh_dims - used)
        return over

    def sizes(self, operands: list[fx.Node], needs: Needs, over: Mapping[str, MeshDims]) -> dict[str, int]:
        """The size with padding of each factor that takes it; the largest operand that has it decides."""
        rule = needs.rule
        found: dict[str, tuple[int, int]] = {}
        alone = all(operand in self.weights for operand in operands)
        for at, operand in enumerate(operands):
            type_ = tensor_type(operand)
            for dim in _padded_dims(type_):
                factor = rule.leader(rule.operands[at][dim])
                if factor not in needs.fills:
                    continue
                rest = rule.inner(rule.operands[at][dim])
                if type_.shape[dim] % rest:
                    continue
                if operand in self.weights and not alone and not over[factor] & self.over[operand][dim]:
                    continue
                candidate = (type_.numel, type_.shape[dim] // rest)
                found[factor] = max(candidate, found.get(factor, candidate))
        return {factor: size for factor, (_, size) in found.items()}

    def operands(self, node: fx.Node, operands: list[fx.Node], needs: Needs, sizes: Mapping[str, int]) -> list[fx.Node]:
        """The operands in the sizes that the call takes, with the padding that it needs."""
        taken = []
        for at, operand in enumerate(operands):
            dims = needs.rule.operands[at]
            for dim, size in enumerate(needs.rule.resized(dims, tensor_type(operand).unpadded.shape, sizes)):
                operand = self.resized(operand, dim, size, node)
            if operand.target is aten.slice.Tensor and operand not in operands and not _takes_strides(node.target):
                operand = self.contiguous(operand, node)
            for dim, names in enumerate(dims):
                factor = needs.rule.leader(names)
                if factor in sizes and (fill := needs.fills[factor][at]) is not None:
                    operand = self.filled(operand, dim, fill, node)
            taken.append(operand)
        return taken

    def rewrite(self, node: fx.Node, operands: list[fx.Node], needs: Needs, sizes: Mapping[str, int]) -> None:
        """Give a call these operands, and results with padding: its arguments speak of sizes."""
        rule = needs.rule
        types = [
            type_ if type_ is None or dims is None else resized(type_, rule.resized(dims, type_.shape, sizes))
            for type_, dims in zip(result_types(node), rule.results, strict=True)
        ]
        if sizes:
            node.target, node.args, node.kwargs = self.arguments(node, operands, types, rule, sizes)
        node.args, node.kwargs = replace_operands((node.args, dict(node.kwargs)), operands)
        self.check_range(node, rule, sizes)
        node.meta["type"] = types[0] if isinstance(node.meta["type"], TensorType) else tuple(types)
        if isinstance(node.meta["type"], TensorType):
            self.note(node, node, 0)

    def arguments(
        self,
        node: fx.Node,
        operands: list[fx.Node],
        types: Sequence[TensorType | None],
        rule: Rule,
        sizes: Mapping[str, int],
    ) -> Localized:
        """A call's target and arguments for sizes with padding: those of a worker whose sizes they were, but for ops
        whose localizers mean a place on the mesh."""
        shapes = [tensor_type(operand).shape for operand in operands]
        results = [None if type_ is None else type_.shape for type_ in types]
        call = LocalCall(node, shapes, results, Strategy((), (), ""), "", 1)
        packet = getattr(node.target, "overloadpacket", None)
        if packet is aten.mean and any(is_reduced(rule, factor) for factor in sizes):
            logical = _unpadded(tensor_operands(node)[0])
            dims = dims_of(call.get("dim"), len(logical))
            count = math.prod(logical[dim] for dim in dims)
            return ops.mean_shard, (node.args[0], dims, call.get("keepdim", False), count, call.get("dtype")), {}
        if packet is aten.embedding_dense_backward:
            return call.replace(num_weights=call.result[0])
        if packet is aten.convolution_backward and call.get("bias_sizes") is not None and results[2] is not None:
            return call.replace(bias_sizes=list(results[2]))
        if packet in (aten.embedding, aten.gather, aten.scatter, aten.mean) or node.target is ops.sample:
            return call.unchanged()
        for factor in sizes:
            placed = tuple(_place(rule, factor, dims) for dims in rule.operands)
            made = tuple(None if dims is None else _place(rule, factor, dims) for dims in rule.results)
            found = localize(node, shapes, results, Strategy(placed, made, factor), "", 1)
            if found != call.unchanged():
                return found
        return call.unchanged()

    def check_range(self, node: fx.Node, rule: Rule, sizes: Mapping[str, int]) -> None:
        """Where a dim with padding is looked up, an index into the padding is an error as any other out of range."""
        name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
        if name not in LOOKUPS or not sizes:
            return
        call = Call.of(node, _unpadded)
        table, index = (call[argument] for argument in LOOKUPS[name])
        type_ = tensor_type(table)
        along = {"embedding": 0, "gather": call.get("dim"), "scatter": call.get("dim")}.get(
            name, min(1, type_.ndim - 1)
        )
        dim = along % max(1, type_.ndim)
        if dim not in _padded_dims(type_):
            return
        rows = type_.unpadded.shape[dim]
        ignored = call.get("ignore_index") if name.startswith("nll") else None
        checked = self.add(node, ops.in_range, index, rows, ignored, type=tensor_type(index), like=index)
        node.replace_input_with(index, checked)

    def follow(self, node: fx.Node, rule: Rule, over: Mapping[str, MeshDims]) -> None:
        """The facts about a call's results that follow from those about its operands."""
        operands = tensor_operands(node)
        parts = [tuple(over.get(rule.leader(dim), NONE) for dim in dims or ()) for dims in rule.results]
        self.parts[node] = parts
        if isinstance(node.meta["type"], TensorType):
            self.over[node] = parts[0]
        if operands and all(operand in self.weights for operand in operands):
            self.weights.add(node)

    def note(self, value: fx.Node, call: fx.Node, index: int) -> None:
        """Note which padding of a call's result is zero; other padding is undefined."""
        padded = _padded_dims(tensor_type(value))
        needs = self.needs.get(call)
        if needs is not None and padded and self.keeps_zero(call, needs.rule):
            operands = tensor_operands(call)
            result = needs.rule.results[index] or ()
            for dim in padded:
                factor = needs.rule.leader(result[dim])
                at = [_place(needs.rule, factor, dims) for dims in needs.rule.operands]
                if all(
                    place is not None and (operand, place) in self.zero
                    for operand, place in zip(operands, at, strict=True)
                ):
                    self.zero.add((value, dim))
        undefined = [dim for dim in padded if (value, dim) not in self.zero]
        if undefined:
            value.meta["undefined"] = undefined

    def keeps_zero(self, call: fx.Node, rule: Rule) -> bool:
        numbers = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, float)]
        known = is_view(call.target) or getattr(call.target, "overloadpacket", None) in _KEEP_ZERO
        return known and bool(rule.linear) and all(map(math.isfinite, numbers)) and bool(tensor_operands(call))

    def constrain(self, node: fx.Node) -> None:
        """A value that the user lays out has blocks that are equal in that layout."""
        value, text = args_of(node)
        layout: Layout = parse_layout(text)
        type_ = tensor_type(value)
        for dim, names in enumerate(layout.shards):
            parts = math.prod(self.mesh.sizes[name] for name in names)
            if type_.shape[dim] % parts:
                size = -(-type_.unpadded.shape[dim] // parts) * parts
                value = self.resized(value, dim, size, node)
        node.args = (value, text)
        node.meta["type"] = tensor_type(value).with_layout(node.meta["type"].layout)
        self.over[node] = tuple(map(frozenset, layout.shards))
        self.alike(node, value)

    def received(self, node: fx.Node) -> None:
        """A value from another mesh comes in blocks of the layout that it is to have, with zeros in their padding."""
        user = next((user for user in node.users if user.target is ops.constrain), None)
        layout = tensor_type(node).layout if user is None else parse_layout(args_of(user)[1])
        type_ = tensor_type(node).with_layout(layout).padded(self.mesh)
        number, _, dtype = args_of(node)
        node.args = (number, list(type_.shape), dtype)
        node.meta["type"] = type_.with_layout(Layout.replicated(type_.ndim))
        self.zero.update((node, dim) for dim in range(type_.ndim))
        self.over[node] = tuple(map(frozenset, layout.shards))

    # -- other sizes, other padding ----------------------------------------------------------------------------------

    def resized(self, value: fx.Node, dim: int, size: int, before: fx.Node) -> fx.Node:
        """The value with another size with padding, or without any, along a dim."""
        type_ = tensor_type(value)
        logical = type_.unpadded.shape[dim]
        if size != logical and type_.shape[dim] not in (size, logical):
            value = self.resized(value, dim, logical, before)
            type_ = tensor_type(value)
        if type_.shape[dim] == size:
            return value
        if size != logical and (made := self.remade(value, dim, size)) is not None:
            return made
        shape = tuple(size if each == dim else length for each, length in enumerate(type_.shape))
        new = resized(type_, shape)
        key = ("resized", value, dim, size)
        if key not in self.known:
            if size == logical:
                made = self.add(before, aten.slice.Tensor, value, dim, 0, size, type=new, like=value)
                self.over[made] = tuple(NONE if at == dim else of for at, of in enumerate(self.over[value]))
            else:
                pads = [0] * (2 * (type_.ndim - dim) - 1) + [size - logical]
                made = self.add(before, aten.constant_pad_nd.default, value, pads, 0, type=new, like=value)
                self.zero.add((made, dim))
            self.known[key] = made
        return self.known[key]

    def contiguous(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """A copy of a value whose padding was cut off, for ops that do not take every tensor's strides."""
        key = ("contiguous", value)
        if key not in self.known:
            made = self.add(before, aten.clone.default, value, type=tensor_type(value), like=value)
            made.kwargs = {"memory_format": torch.contiguous_format}
            self.known[key] = made
        return self.known[key]

    def remade(self, value: fx.Node, dim: int, size: int) -> fx.Node | None:
        """A value that is made from numbers, or computed from such ones alone along the dim, made larger instead of
        being padded; None for any other."""
        key = ("remade", value, dim, size)
        if key in self.known:
            return self.known[key]
        needs = self.needs.get(value)
        if needs is None or not isinstance(value.meta["type"], TensorType):
            return None
        rule = needs.rule
        names = (rule.results[0] or ())[dim]
        factor = rule.leader(names)
        if not factor or not rule.leads(factor) or size % rule.inner(names):
            return None
        sizes = {factor: size // rule.inner(names)}
        packet = getattr(value.target, "overloadpacket", None)
        if value.target is ops.random:
            made = _copy_of(self.graph, value)
            made.args = (
                made.args[0],
                [size if at == dim else each for at, each in enumerate(args_of(value)[1])],
                *made.args[2:],
            )
            made.meta["type"] = resized(
                tensor_type(value), rule.resized(rule.results[0] or (), tensor_type(value).shape, sizes)
            )
            self.needs[made] = needs
            self.over[made], self.parts[made] = self.over[value], self.parts[value]
            self.note(made, made, 0)
            self.known[key] = made
            return made
        operands = []
        for operand, dims in zip(tensor_operands(value), rule.operands, strict=True):
            at = _place(rule, factor, dims)
            if at is not None:
                larger = rule.resized(dims, tensor_type(operand).shape, sizes)[at]
                same = tensor_type(operand).shape[at] == larger
                remade = operand if same else self.remade(operand, at, larger)
                if remade is None or any(fill is not None for fill in needs.fills.get(factor, (0.0,))):
                    return None
                operand = remade
            operands.append(operand)
        if all(_place(rule, factor, dims) is None for dims in rule.operands) and packet not in _MADE:
            return None
        # A value with padding along other dims keeps it.
        for at, each in enumerate(rule.results[0] or ()):
            if at != dim and at in _padded_dims(tensor_type(value)) and (other := rule.leader(each)):
                sizes[other] = tensor_type(value).shape[at] // rule.inner(each)
        made = _copy_of(self.graph, value)
        made.meta["type"] = tensor_type(value).unpadded
        self.needs[made] = needs
        self.rewrite(made, operands, needs, sizes)
        self.over[made], self.parts[made] = self.over[value], self.parts[value]
        if value in self.weights:
            self.weights.add(made)
        self.known[key] = self.larger[value] = made
        return made

    def filled(self, value: fx.Node, dim: int, fill: float, before: fx.Node) -> fx.Node:
        """The value with its padding along a dim overwritten."""
        if dim not in _padded_dims(tensor_type(value)) or (fill == 0 and (value, dim) in self.zero):
            return value
        type_ = tensor_type(value)
        key = ("filled", value, dim, fill)
        if key not in self.known:
            size, number = type_.unpadded.shape[dim], _number(fill, type_.dtype)
            if _is_fusible(before):  # in its kernel the mask costs nothing
                mask = self.mask(size, type_.shape[dim], type_.ndim - dim - 1)
                made = self.add(before, aten.masked_fill.Scalar, value, mask, number, type=type_, like=value)
            else:
                made = self.add(before, ops.fill_padding, value, dim, size, number, [], type=type_, like=value)
            if fill == 0:
                self.zero.add((made, dim))
            else:
                self.zero -= {(made, other) for other in range(type_.ndim)}
            self.known[key] = made
        return self.known[key]

    def mask(self, size: int, padded: int, behind: int) -> fx.Node:
        """Which of `padded` elements are padding, of a dim with `behind` dims behind it."""
        key = ("mask", size, padded, behind)
        if key not in self.known:
            first = next(node for node in self.graph.fx.nodes if node.op != "placeholder")
            index = TensorType(torch.int64, (padded,), padding=(padded - size,))
            masks = TensorType(torch.bool, (padded,), padding=(padded - size,))
            with self.graph.fx.inserting_before(first):
                places = self.graph.call(aten.arange.default, padded, dtype=torch.int64, type=index)
                mask = self.graph.call(aten.ge.Scalar, places, size, type=masks)
                if behind:
                    shape = (padded, *[1] * behind)
                    type_ = TensorType(torch.bool, shape, padding=(padded - size, *[0] * behind))
                    mask = self.graph.call(aten.view.default, mask, list(shape), type=type_)
            self.known[key] = mask
        return self.known[key]

    def add(self, before: fx.Node, op: Any, value: fx.Node, *args: Any, type: TensorType, like: fx.Node) -> fx.Node:
        """A new call in front of `before`, of which all is known as of the value `like`."""
        type = type.with_layout(Layout.replicated(type.ndim))
        with self.graph.fx.inserting_before(before):
            made = self.graph.call(op, value, *args, type=type, provenance=provenance(before))
        self.alike(made, like)
        return made

    def alike(self, made: fx.Node, value: fx.Node) -> None:
        self.zero.update((made, dim) for dim in range(tensor_type(made).ndim) if (value, dim) in self.zero)
        self.over.setdefault(made, self.over[value])
        if value in self.weights:
            self.weights.add(made)


def _copy_of(graph: Graph, node: fx.Node) -> fx.Node:
    with graph.fx.inserting_after(node):
        copy = graph.fx.node_copy(node)
    copy.meta.pop("undefined", None)
    return copy


def _is_fusible(node: fx.Node) -> bool:
    """Whether a value's reader becomes part of a generated kernel. Most results of the program were made by one."""
    if node.op == "output" or node.target in composites():
        return True
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _REDUCTIONS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _takes_strides(target: Any) -> bool:
    """Whether an op is known to compute the same on a part of a larger tensor as on a copy of it."""
    packet = getattr(target, "overloadpacket", None)
    if packet in (aten.as_strided, aten._reshape_alias) or str(packet).endswith("_backward"):
        return False
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return pointwise or is_view(target) or find(target, "padding") is not None


def _unpadded(node: fx.Node) -> Any:
    type_ = node.meta["type"]
    if isinstance(type_, TensorType):
        return type_.unpadded.shape
    return tuple(() if part is None else part.unpadded.shape for part in type_)


def _padded_dims(type_: TensorType) -> list[int]:
    return [dim for dim, pad in enumerate(type_.padding) if pad]


def _size(value: fx.Node, dim: int) -> int:
    return tensor_type(value).unpadded.shape[dim]


def _place(rule: Rule, factor: str, dims: Sequence[tuple[str, ...]]) -> int | None:
    """The dim that a factor leads."""
    return next((at for at, dim in enumerate(dims) if factor and rule.leader(dim) == factor), None)


def _number(fill: Fill, dtype: torch.dtype) -> float | int | bool:
    """A fill as a number of a dtype."""
    assert fill is not None
    if dtype is torch.bool:
        return fill > 0
    if dtype.is_floating_point or dtype.is_complex:
        return fill
    if math.isinf(fill):
        return torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min
    return int(fill)
