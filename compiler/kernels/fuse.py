"""Which ops become one kernel.

A group starts as one op. It takes in the groups of its operands, and then groups that read the same values, as long as
three things hold: the group can be lowered (`compiler.kernels.lower` decides, by doing it), the graph of groups stays
without cycles, and less memory moves than before. Views and constants are in no group: kernels look through them, and
those that nobody else needs disappear.

Groups do not reach across a collective that somebody waits for at once: what it sends is ready as early as before. One
whose result is read later (a gradient's sum) is sent with others, wherever the pass behind this one finds a place.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.alike import Memo
from monarch.compiler.context import Context, Pass
from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.graph import SIZED, Graph, Provenance, args_of, is_of_named_size, provenance
from monarch.compiler.kernels.lower import FusionGroup, LoweringContext, Space, Unfusable, lower_group, space_of
from monarch.compiler.kernels.lower.values import is_lowered, is_transparent, key_of
from monarch.compiler.kernels.recompute import AGAIN, compute_again
from monarch.compiler.kernels.tensors import tensors_of
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.ir import Buffer, Kernel, Load, Store
from monarch.compiler.loops.text import parse_kernel, print_checked
from monarch.compiler.types import VARYING, Layout, TensorType

_CPU = MACHINES["cpu"]
OVERHEAD = round(_CPU.start * _CPU.memory)
"""The cost of starting an op, as the bytes that could be moved in that time. Groups are a CPU's for every target."""

WORTHWHILE = 4 * 1024 * 1024
"""A program's ops are made kernels if at least so many bytes fewer move in a step, which takes about 0.4 ms: a kernel
costs some tenths of a second to build."""


@dataclass
class _Unit:
    """Some ops on the way to be a kernel, or one op that stays as it is (`lowered` is None)."""

    number: int
    nodes: list[fx.Node]
    region: int
    spaces: list[Space] = field(default_factory=list)
    lowered: FusionGroup | None = None
    cost: int = 0
    """The bytes that it moves, and OVERHEAD."""
    before: int = 0
    """A bit for each unit of its region that it depends on, also through others; bits of units that are in others now
    mean nothing. Nothing outside of a region depends on one unit of it and is needed by another."""
    needs: set[int] = field(default_factory=set)
    """The units of its region whose values it reads."""
    needed_by: set[int] = field(default_factory=set)
    """Those of its region that read its values."""


class FuseKernels(Pass):
    """Put ops into generated kernels.

        %a = aten.mul.Tensor(%x, 2.0)        : f32[64]
        %b = aten.add.Tensor(%a, %y)         : f32[64]
        -->
        %k = kernel([%x, %y], "kernel mul_add(a0: f32[64], a1: f32[64]) -> (b0: f32[64])…", [-1]) : (f32[64])
        %b = getitem(%k, 0)                  : f32[64]

    The context's `kernels` is "auto" (where it spares enough, see WORTHWHILE), "all" or "off"; the option `rounding` is
    "eager" (every op's result is rounded to its dtype, as ATen does) or "chain" (bf16 and f16 are rounded once, where a
    kernel stores them). For CPUs one nest may reduce rows and add up columns; emitters for GPUs take two.
    """

    name = "fuse-kernels"

    def run(self, graph: Graph, context: Context) -> Graph:
        when, options = context.kernels, context.options
        if when == "off":
            return graph
        parted = graph.copy()
        fusion = _Fusion(parted, options.rounding, options.target == "cpu", compute_again(parted))
        fusion.merge()
        found = fusion.kernels(singles=when == "all")

        def times(node: fx.Node) -> int:
            return context.stands_for.get(provenance(node).block, 1)

        if not found or (when == "auto" and sum(each.spares * times(each.nodes[0]) for each in found) < WORTHWHILE):
            return graph
        return rewritten(parted, [_made(each, fusion.tensors) for each in found])


def has_sized(graph: Graph) -> bool:
    """Whether a graph, or a region of it, has a kernel that takes its sizes."""
    own = any(node.target is ops.kernel and parse_kernel(args_of(node)[1]).sized for node in graph.calls)
    return own or any(map(has_sized, graph.regions.values()))


@dataclass
class _Found:
    """A kernel to be."""

    group: FusionGroup
    nodes: list[fx.Node]
    spares: int
    """About how many bytes fewer are moved a step."""


class _Fusion:
    def __init__(self, graph: Graph, rounding: str, sums: bool, added: Collection[fx.Node]) -> None:
        self.graph = graph
        self.added = added
        """Nodes that the graph had not before `compute_again`."""
        places = _places(graph)
        self.tensors = tensors_of(graph)
        self.order = {node: at for at, node in enumerate(graph.fx.nodes)}
        self.keys = {node: key_of(node) for node in graph.fx.nodes}
        self.context = LoweringContext(self.tensors, self.keys.__getitem__, rounding, places, graph.mesh.sizes, sums)
        self.units: dict[int, _Unit] = {}
        self.unit_of: dict[fx.Node, int] = {}
        self.starts: dict[int, int] = {}
        """The number of the first unit of each."""
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.refused: set[tuple[frozenset[fx.Node], frozenset[fx.Node]]] = set()
        self.named: set[fx.Node] = set()
        """Values of named sizes, and views of them: kernels have sizes in them, and read through views."""
        self.find_units()

    def unit(self, node: fx.Node) -> _Unit:
        return self.units[self.unit_of[node]]

    def is_lowered(self, node: fx.Node) -> bool:
        return node in self.unit_of and self.unit(node).lowered is not None

    # -- units -------------------------------------------------------------------------------------------------------

    def find_units(self) -> None:
        region, borders = 0, self.borders()
        for node in self.graph.fx.nodes:
            if node.op == "output":
                continue
            region += node in borders
            unit = _Unit(len(self.units), [node], region)
            call = node.all_input_nodes[0] if node.target is operator.getitem else node
            reads_named = any(operand in self.named for operand in (*call.all_input_nodes, *node.all_input_nodes))
            if is_of_named_size(node) or (reads_named and is_transparent(self.keys[node])):
                self.named.add(node)
            try:
                if reads_named or node in self.named:
                    raise Unfusable("its sizes are not known")
                unit.spaces = [space_of(node, self.context)]
                unit.lowered = lower_group([node], [node], unit.spaces, self.context)
                unit.cost = self.cost_of(unit.lowered)
            except Unfusable:
                pass
            self.units[unit.number], self.unit_of[node] = unit, unit.number
            self.starts.setdefault(region, unit.number)
        for node in self.unit_of:
            unit = self.unit(node)
            for source in self.sources(node):
                self.readers.setdefault(source, []).append(node)
                below = self.unit(source)
                if below.region == unit.region:
                    unit.needs.add(below.number)
                    below.needed_by.add(unit.number)
                    unit.before |= below.before | self.bit(below)

    def borders(self) -> set[fx.Node]:
        """Transfers, and the collectives whose results are read before the next op that computes much, but those that
        wait for nothing (parameters that are gathered)."""
        heavy, before = 0, dict[fx.Node, int]()
        for node in self.graph.fx.nodes:
            before[node] = heavy
            heavy += is_heavy(node, self.keys[node])

        def is_border(node: fx.Node) -> bool:
            if not ops.is_collective(node.target):
                return node.target in (ops.send, ops.recv)
            if all(operand.meta.get("kind") == "state" for operand in node.all_input_nodes):
                return False
            return any(before[reader] == before[node] for reader in self.readers_of(node) if reader.op != "output")

        return {node for node in before if is_border(node)}

    def readers_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """The readers of a value, of one of several results, or of a view of it."""
        for user in node.users:
            if user.target is operator.getitem or is_transparent(self.keys[user]):
                yield from self.readers_of(user)
            else:
                yield user

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The values that an op reads: those behind views, and for a result that is lowered by itself those that the op
        reads whose result it is."""
        if node.target is operator.getitem and self.is_lowered(node):
            node = node.all_input_nodes[0]
        return list(dict.fromkeys(self.behind_views(operand) for operand in node.all_input_nodes))

    def behind_views(self, node: fx.Node) -> fx.Node:
        while is_transparent(self.keys[node]) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    def outputs(self, nodes: Iterable[fx.Node], replaced: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """Those nodes of a group that somebody outside of it reads, through whatever views. `replaced` says of an op
        with several results whether kernels compute all of them."""
        inside = set(nodes)
        return [node for node in sorted(inside, key=self.order.__getitem__) if self.is_read(node, inside, replaced)]

    def is_read(self, node: fx.Node, inside: set[fx.Node], replaced: Callable[[fx.Node], bool]) -> bool:
        for user in node.users:
            if user in inside:
                continue
            if is_transparent(self.keys[user]):
                if self.is_read(user, inside, replaced):
                    return True
            elif not (replaced(user) and set(_taken(user)) <= inside):
                return True
        return False

    def all_lowered(self, call: fx.Node) -> bool:
        taken = _taken(call)
        return bool(taken) and all(user.target is operator.getitem and self.is_lowered(user) for user in taken)

    def lower(self, nodes: Sequence[fx.Node], spaces: Sequence[Space], outputs: Sequence[fx.Node]) -> FusionGroup:
        group = lower_group(nodes, outputs, spaces, self.context)
        if any(self.behind_views(node) in nodes for node in group.inputs):
            raise Unfusable("a view of one of its own values cannot be looked through")
        return group

    def cost_of(self, group: FusionGroup) -> int:
        return group.traffic(self.tensors) + OVERHEAD

    # -- merging -----------------------------------------------------------------------------------------------------

    def merge(self) -> None:
        for node in self.unit_of:
            if AGAIN in node.meta and self.is_lowered(node):
                for reader in self.readers[node]:
                    # It is computed where the reader reads it, in whatever loops these are.
                    unit = self.unit(node)
                    own, unit.spaces = unit.spaces, list(self.unit(reader).spaces)
                    self.try_merge(unit, self.unit(reader), least=0)
                    if self.unit(reader) is not unit:
                        unit.spaces = own
        for node in self.unit_of:
            if self.is_lowered(node):
                for source in self.by_size(self.sources(node)):
                    self.try_merge(self.unit(source), self.unit(node), least=0)
        for source in self.by_size(self.readers):
            readers = self.readers[source]
            for first, second in zip(readers, readers[1:], strict=False):
                # One loop over much that is not shared is slower than two: memory is read best in few streams.
                self.try_merge(self.unit(first), self.unit(second), least=1 / 16)

    def by_size(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        one_tensor = (node for node in nodes if node in self.tensors)
        return sorted(one_tensor, key=lambda node: (-self.tensors[node].nbytes, self.order[node]))

    def try_merge(self, one: _Unit, two: _Unit, least: float) -> None:
        """Make one unit of two, if that can be and spares at least such a part of the bytes that it moves."""
        if one is two or one.lowered is None or two.lowered is None or one.region != two.region:
            return
        if not _alike(one.spaces, two.spaces, self.context.sums) or self.makes_cycle(one, two):
            return
        pair = frozenset(one.nodes), frozenset(two.nodes)
        if pair in self.refused:
            return
        nodes = sorted({*one.nodes, *two.nodes}, key=self.order.__getitem__)
        spaces = list(dict.fromkeys([*one.spaces, *two.spaces]))
        try:
            lowered = self.lower(nodes, spaces, self.outputs(nodes, self.all_lowered) or nodes[-1:])
        except Unfusable:
            self.refused.add(pair)
            return
        if self.needs_more(lowered) and not (self.needs_more(one.lowered) or self.needs_more(two.lowered)):
            self.refused.add(pair)
            return
        cost = self.cost_of(lowered)
        spared = one.cost + two.cost - cost
        if spared <= 0 or (cost > 2 * OVERHEAD and spared - OVERHEAD < cost * least):
            self.refused.add(pair)
            return
        self.join(one, two)
        one.nodes, one.spaces, one.lowered, one.cost = nodes, spaces, lowered, cost

    def needs_more(self, group: FusionGroup) -> bool:
        """Whether a group could write over a value that it reads if it did not look elements of it up besides: the loss
        of logits and their gradient, as one, would need memory for both."""
        body, outputs = group.nest.body, group.outputs
        loads = [each for each in body if isinstance(each, Load)]
        stores = [each for each in body if isinstance(each, Store)]
        found = {load.buffer for load in loads if load.gather >= 0 and group.inputs[load.buffer].op != "placeholder"}
        over = {load.index: load.buffer for load in loads if load.gather < 0 and load.buffer in found}
        return any(
            self.tensors[group.inputs[over[store.index]]] == self.tensors[outputs[store.buffer - len(group.inputs)]]
            for store in stores
            if store.index in over
        )

    def makes_cycle(self, one: _Unit, two: _Unit) -> bool:
        """Whether something outside of both depends on the one and is needed by the other."""
        return any(
            number != first.number and self.units[number].before & self.bit(first)
            for first, second in ((one, two), (two, one))
            for number in second.needs
        )

    def join(self, one: _Unit, two: _Unit) -> None:
        """From here on `one` stands for both."""
        del self.units[two.number]
        for node in two.nodes:
            self.unit_of[node] = one.number
        for number in two.needed_by:
            reader = self.units.get(number, one)
            reader.needs.discard(two.number)
            reader.needs.add(one.number)
        for number in two.needs:
            needed = self.units[number]
            needed.needed_by.discard(two.number)
            needed.needed_by.add(one.number)
        both = {one.number, two.number}
        one.needs = (one.needs | two.needs) - both
        one.needed_by = (one.needed_by | two.needed_by) - both
        own = self.bit(one)
        one.before = (one.before | two.before) & ~(own | self.bit(two))
        gained = own | one.before
        waiting = [*one.needed_by]
        while waiting:  # a unit that has all of it has readers that have all of it
            reader = self.units[waiting.pop()]
            if reader.before | gained != reader.before:
                reader.before |= gained
                waiting += reader.needed_by

    def bit(self, unit: _Unit) -> int:
        return 1 << unit.number - self.starts[unit.region]

    # -- kernels -----------------------------------------------------------------------------------------------------

    def kernels(self, singles: bool) -> list[_Found]:
        """Which units are worth a kernel."""
        units = [unit for unit in self.units.values() if unit.lowered is not None]
        chosen = {node: unit for unit in units if singles or self.is_worth_it(unit) for node in unit.nodes}

        def replaced(call: fx.Node) -> bool:
            taken = _taken(call)
            return bool(taken) and all(user in chosen for user in taken)

        # An op of which one result is needed as it is runs anyway: then kernels need not compute the others.
        while lost := {
            unit.number
            for node, unit in chosen.items()
            if node.target is operator.getitem and not replaced(node.all_input_nodes[0])
        }:
            chosen = {node: unit for node, unit in chosen.items() if unit.number not in lost}
        found = []
        for unit in sorted({unit.number: unit for unit in chosen.values()}.values(), key=self.first):
            if outputs := self.outputs(unit.nodes, replaced):
                group = self.lower(unit.nodes, unit.spaces, outputs)
                moved = group.traffic(self.tensors)
                found.append(_Found(group, unit.nodes, sum(map(self.apart, unit.nodes)) - moved))
        return found

    def first(self, unit: _Unit) -> int:
        return self.order[unit.nodes[0]]

    def is_worth_it(self, unit: _Unit) -> bool:
        if len(unit.nodes) > 1:
            return True
        # ATen is as fast where nothing is fused; but for one result of an op whose other results are.
        (node,) = unit.nodes
        return node.target is operator.getitem and any(
            self.is_lowered(user) and len(self.unit(user).nodes) > 1 for user in node.all_input_nodes[0].users
        )

    def apart(self, node: fx.Node) -> int:
        """The bytes that an op moves where it is ATen's: its operands and results."""
        if node in self.added:
            return 0
        if node.target is not operator.getitem:
            read = sum(self.tensors[source].nbytes for source in node.all_input_nodes if source in self.tensors)
            return read + self.tensors[node].nbytes
        call = node.all_input_nodes[0]
        read = sum(self.tensors[source].nbytes for source in call.all_input_nodes if source in self.tensors)
        return self.tensors[node].nbytes + read // len(call.users)


def _places(graph: Graph) -> dict[str, fx.Node]:
    """A value with the worker's position along each mesh dim on which random numbers, or lookups in a block, depend: a
    kernel of them reads it. Where none does, it is not in the new graph."""
    names = {
        name for node in graph.calls if node.target is ops.random for nested in args_of(node)[6] for name in nested
    }
    names |= {args_of(node)[-1] for node in graph.calls if node.target in (ops.gather_shard, ops.scatter_shard)}
    first = next((node for node in graph.fx.nodes if node.op != "placeholder"), None)
    found = {}
    if names and first is not None:
        with graph.fx.inserting_before(first):
            for name in sorted(names):
                type_ = TensorType(torch.int64, ()).with_layout(Layout.replicated(0).place(name, VARYING))
                found[name] = graph.call(ops.axis_index, name, type=type_)
    return found


def _taken(call: fx.Node) -> list[fx.Node]:
    """The users of an op but those of its results that nobody reads, of which one may be none at all."""
    return [user for user in call.users if user.users or user.target is not operator.getitem]


def _alike(a: Sequence[Space], b: Sequence[Space], sums: bool) -> bool:
    """Whether loops over the one can be loops over the other; with `sums`, also where one reduces rows and the other
    columns."""
    reducing = {(s.kept_count, s.reduced_count) for s in (*a, *b) if s.reduced_count > 1}
    plain = {s.kept_count for s in (*a, *b) if s.reduced_count == 1}
    if not reducing:
        return len(plain) == 1
    (kept, reduced), *others = reducing
    if others:
        return sums and others == [(reduced, kept)] and plain <= {kept, reduced, kept * reduced}
    return plain <= {kept, kept * reduced}


# -- the new graph -----------------------------------------------------------------------------------------------------


@dataclass
class FusedKernel:
    """A kernel that takes the place of some nodes: it reads `inputs`, and computes those of the nodes that are
    `outputs`. `stands_for` are the ops that it computes, for people, and `why` is a reason to show them."""

    kernel: Kernel
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    nodes: list[fx.Node]
    stands_for: list[fx.Node]
    why: str = ""


def _made(found: _Found, tensors: Mapping[fx.Node, Buffer]) -> FusedKernel:
    inputs, outputs, nest = list(found.group.inputs), list(found.group.outputs), found.group.nest
    buffers = tuple([tensors[node] for node in inputs]), tuple([tensors[node] for node in outputs])
    sized = any(SIZED in node.meta for node in (*found.nodes, *inputs))
    key = _name(found.nodes), buffers, id(nest), sized  # groups that are alike have one nest
    known = _KERNELS.get(key)
    if known is None:
        kernel = Kernel(key[0], *buffers, (nest,), sized)
        check_kernel(kernel)
        known = _KERNELS.keep(key, kernel)
    return FusedKernel(known, inputs, outputs, found.nodes, found.nodes)


_KERNELS: Memo[Kernel] = Memo(1024)
"""Kernels of groups that are alike, as those of equal layers are; they hold the nests whose ids are in the keys."""


def alone(node: fx.Node, context: LoweringContext) -> FusedKernel | None:
    """One op as a kernel; None where it can be none."""
    try:
        group = lower_group([node], [node], [space_of(node, context)], context)
    except Unfusable:
        return None
    return _made(_Found(group, [node], 0), context.tensors)


def _name(nodes: Iterable[fx.Node]) -> str:
    """The ops of a kernel for people, in order."""
    packets = (node.meta.get("part_of", key_of(node)).split("#")[0].rsplit(".", 1)[-1].strip("_") for node in nodes)
    return "_".join(dict.fromkeys(packets))[:60].strip("_")


def is_heavy(node: fx.Node, key: str) -> bool:
    """Whether an op computes much that no kernel can: matrix products, attention. Views, blocks of a tensor and
    elements of a result do not, nor does an op whose results are lowered one by one, nor a collective."""
    if node.op != "call_function" or node.target in (operator.getitem, ops.kernel) or ops.is_collective(node.target):
        return False
    return not is_transparent(key) and key not in LOCAL_OPS and not is_lowered(key)


def rewritten(graph: Graph, made: Sequence[FusedKernel]) -> Graph:
    """The graph with kernels instead of their ops, each in the place of its last op, and without nodes that nothing
    needs now."""
    kernel_of = {node: each for each in made for node in each.nodes}
    order = {node: at for at, node in enumerate(graph.fx.nodes)}
    last = {id(each): max(order[node] for node in each.nodes) for each in made}
    output = graph.fx.output_node()
    reads: dict[int, list[fx.Node]] = {}
    """The operands of each node or kernel, by its place in the order: that of its last op for a kernel."""
    items: dict[int, fx.Node | FusedKernel] = {}
    pending = [output, *graph.placeholders, *(call for call in graph.calls if ops.acts(call.target))]
    while pending:
        node = pending.pop()
        item = kernel_of.get(node, node)
        at = order[item] if isinstance(item, fx.Node) else last[id(item)]
        if at not in items:
            items[at] = item
            reads[at] = list(item.all_input_nodes if isinstance(item, fx.Node) else item.inputs)
            pending += reads[at]
    place = {node: at for at, item in items.items() for node in ([item] if isinstance(item, fx.Node) else item.outputs)}
    waiting = {at: len({place[node] for node in nodes}) for at, nodes in reads.items()}
    readers: dict[int, list[int]] = {}
    for at, nodes in reads.items():
        for source in {place[node] for node in nodes}:
            readers.setdefault(source, []).append(at)
    ready = [at for at, count in waiting.items() if not count]
    heapq.heapify(ready)
    new = graph.empty_like()
    values: dict[fx.Node, fx.Node] = {}
    while ready:
        at = heapq.heappop(ready)
        item = items[at]
        if isinstance(item, fx.Node):
            values[item] = new.append_copy(item, values)
        else:
            _call(new, item, values)
        for reader in readers.get(at, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    assert output in values, "kernels wait for each other"
    return new


def _call(graph: Graph, made: FusedKernel, values: dict[fx.Node, fx.Node]) -> None:
    block = provenance(made.nodes[-1]).block

    def here(node: fx.Node) -> Provenance:
        """While blocks are folded, a kernel of two of them belongs to that where it stands, and to no module."""
        of = provenance(node)
        return of if of.block == block else replace(of, block=block, module="")

    first = made.outputs[0]
    call = graph.call(
        ops.kernel,
        [values[node] for node in made.inputs],
        print_checked(made.kernel),
        [-1] * len(made.outputs),
        type=tuple(node.meta["type"] for node in made.outputs),
        provenance=replace(here(first), fused=tuple(made.stands_for)),
        name=f"{made.kernel.name}_kernel",  # no value's own name
    )
    if made.why:
        call.meta["why"] = made.why
    for number, node in enumerate(made.outputs):
        result = graph.call(operator.getitem, call, number, type=node.meta["type"], name=node.name)
        result.meta.update(node.meta)
        if "provenance" in node.meta:
            result.meta["provenance"] = here(node)
        values[node] = result
