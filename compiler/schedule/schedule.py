"""A worker's schedule of a partitioned graph: instructions in order, buffers, lifetimes, the commit point.

The passes that bound a worker's memory make schedules to know it; a plan is the last one, written down.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import cached_property
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.work import local_bytes
from monarch.compiler.errors import Source
from monarch.compiler.graph import Graph, Provenance, args_of, provenance, tensor_type
from monarch.compiler.loops.ir import may_overwrite
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.ops.record import enter, of_packet
from monarch.compiler.ops.schema import fills_in_place, viewed_operand
from monarch.compiler.plan.plan import Instruction, Slot, ValueSpec
from monarch.compiler.schedule.failing import before_the_commit
from monarch.compiler.symbols import same

aten = torch.ops.aten

_IN_PLACE = (
    "add sub mul div addcmul addcdiv lerp sqrt rsqrt exp log log1p neg abs reciprocal clamp clamp_min clamp_max relu "
    "sigmoid tanh silu gelu pow erf sin cos floor round masked_fill bitwise_and bitwise_or logical_not sign square"
).split()
"""Pointwise ops whose in-place form computes the same bits."""
enter((f"aten.{name}" for name in _IN_PLACE), in_place=True)

ROW_MAJOR = {aten.view.default: "aten.reshape.default", aten._unsafe_view.default: "aten.reshape.default"}
"""A collective's result is contiguous where the traced value may not have been, so views must be able to copy."""

OVERLAPPING = {aten.expand, aten.as_strided, aten.unfold}
"""Views in which one element may stand at several places."""


class Schedule:
    """A graph as one worker runs it: an instruction for each of its calls, in their order, and one "commit" before the
    first that writes over state.

    The graph changes: it gets a copy of each result that would share another's buffer, and its kernels are told what
    they overwrite. So a pass that only wants to know makes the schedule of a copy.

    `calls`          the graph's calls in order; a call's place in this list is its position
    `slots`          for each value its slot in the worker's frame
    `roots`          for each value the one whose buffer it shares in the end: views share the buffer of what they view
    `members`        for each of these all that share it
    `last`           for each value that is no result the position of the last call that reads it, or -1
    `replaced`       the labels of states that the step replaces
    `overwrites`     for each call whether it writes over what it reads
    `state_writers`  the positions of the calls that write over state
    `sources`        the users' lines that `instructions` refer to, and the callers of these
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.roots: dict[fx.Node, fx.Node] = {}
        self.overlapping: set[fx.Node] = set()  # values whose elements share memory (expand): never written in place
        self.find_roots()
        self.copy_shared_results()
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for value, root in self.roots.items():
            self.members.setdefault(root, []).append(value)
        self.calls = list(graph.calls)
        self.early = before_the_commit(self.calls)  # because they or a reader of their results can fail
        self.slots = {node: slot for slot, node in enumerate((*graph.placeholders, *self.calls))}
        self.last = self.last_uses()
        self.replaced = graph.states.keys() & graph.updates.keys()
        self.sources: dict[Source, int] = {}
        self._numbers: dict[int, int] = {}  # the same, by the id of a node's target and arguments: calls share these
        self.overwrites: list[bool] = []
        self.state_writers: list[int] = []
        for at, node in enumerate(self.calls):
            written = self.written(node, at)
            self.overwrites.append(bool(written))
            if any(root.op == "placeholder" for root in written):
                self.state_writers.append(at)

    @cached_property
    def inputs(self) -> tuple[ValueSpec, ...]:
        """In the order in which a plan takes them: inputs, states, scalars and seeds."""
        return tuple(self.value(p) for p in self.graph.placeholders if p.meta["kind"] != "constant")

    @cached_property
    def constant_slots(self) -> dict[str, int]:
        """The slots of constants by label."""
        return {p.meta["label"]: self.slots[p] for p in self.graph.placeholders if p.meta["kind"] == "constant"}

    @cached_property
    def outputs(self) -> tuple[ValueSpec, ...]:
        """The step's results, in order, and every state that it changes or makes."""
        states = self.graph.states
        returned = [node for node in self.graph.returns if node is not None]
        specs = [
            ValueSpec("return", at, tensor_type(node).unpadded, self.slots[node]) for at, node in enumerate(returned)
        ]
        for label, node in self.graph.updates.items():
            specs.append(ValueSpec("state", label, states.get(label, tensor_type(node)).unpadded, self.slots[node]))
        return tuple(specs)

    @cached_property
    def donated(self) -> tuple[bool, ...]:
        """For each input, whether the step may overwrite or free its buffer: that of a state that it replaces."""
        return tuple(spec.kind == "state" and spec.label in self.replaced for spec in self.inputs)

    @cached_property
    def instructions(self) -> list[Instruction]:
        """Without places in the arena."""
        free: dict[int, list[int]] = {}
        for value, at in self.last.items():
            free.setdefault(at, []).append(self.slots[value])
        instructions: list[Instruction] = []
        for at, node in enumerate(self.calls):
            if self.state_writers and at == self.state_writers[0]:
                instructions.append(Instruction("commit", (), {}, -1))
            instructions.append(self.instruction(node, self.overwrites[at], tuple(sorted(free.get(at, ())))))
        return instructions

    # -- buffers ---------------------------------------------------------------------------------------------------

    def find_roots(self) -> None:
        for node in self.graph.fx.nodes:
            self.roots[node] = self.roots[viewed] if (viewed := viewed_operand(node)) is not None else node
            packet = getattr(node.target, "overloadpacket", None)
            if packet in OVERLAPPING or (viewed is not None and viewed in self.overlapping):
                self.overlapping.add(node)

    def copy_shared_results(self) -> None:
        """Give every result a buffer of its own: a returned view of state would change when the next step writes it,
        and a view of a part of a larger buffer would keep all of that."""
        graph = self.graph
        states = {p.meta["label"]: p for p in graph.placeholders if p.meta["kind"] == "state"}
        taken: dict[fx.Node, str] = {}
        updates = graph.updates
        returns = graph.returns

        def own(node: fx.Node, label: str) -> fx.Node:
            root = self.roots[node]
            borrowed = root.op == "placeholder" and root is not states.get(label)
            if borrowed or self.is_part(node) or root in taken or node in self.overlapping:
                with graph.fx.inserting_before(graph.fx.output_node()):
                    line = Provenance(provenance(node).source)
                    copy = graph.call(aten.clone.default, node, type=node.meta["type"], provenance=line)
                self.roots[copy] = copy
                return copy
            taken[root] = label
            return node

        updates = {label: own(node, label) for label, node in updates.items()}
        returns = [node and own(node, "") for node in returns]
        graph.set_output(returns, updates)

    def is_part(self, value: fx.Node) -> bool:
        """Whether a value is a view of less than its whole buffer."""
        root = self.roots[value]
        if root is value:
            return False
        return local_bytes(self.graph, tensor_type(value)) < local_bytes(self.graph, root.meta["type"])

    def last_uses(self) -> dict[fx.Node, int]:
        """For each value that is no result, the position of the call after which nobody reads it."""
        last: dict[fx.Node, int] = dict.fromkeys(self.graph.placeholders, -1)
        for i, node in enumerate(self.calls):
            last[node] = i
            for operand in node.all_input_nodes:
                last[operand] = i
        for result in (*self.graph.returns, *self.graph.updates.values()):
            if result is not None:
                last.pop(result, None)
        return last

    def written(self, node: fx.Node, i: int) -> list[fx.Node]:
        """The nodes whose buffers the op writes its results over: that of its first operand for ATen's in-place ops, of
        any operand for a kernel, by its argument `over`."""
        if node.target is ops.kernel:
            return self.written_by_kernel(node, i)
        packet = getattr(node.target, "overloadpacket", None)
        if packet is None or not of_packet(packet, "in_place") or _inplace_overload(node.target) is None:
            return []
        target = args_of(node)[0]
        if not isinstance(target, fx.Node):
            return []
        root = self.may_take(target, node, node, i, self.shared(node))
        return [] if root is None else [root]

    def written_by_kernel(self, node: fx.Node, i: int) -> list[fx.Node]:
        tensors, text, over = args_of(node)
        kernel = parse_kernel(text)
        results = {args_of(user)[1]: user for user in node.users}
        over, roots = list(over), []
        taken, shared = set(over), self.shared(node)
        for output, result in sorted(results.items()):
            for at in kernel.other_inputs[output]:
                if at in taken or not may_overwrite(kernel, output, at):
                    continue
                root = self.may_take(tensors[at], result, node, i, shared)
                if root is not None:
                    over[output] = at
                    taken.add(at)
                    roots.append(root)
                    break
        node.args = (tensors, text, over)
        return roots

    def shared(self, call: fx.Node) -> set[fx.Node]:
        """The roots that several operands of a call share."""
        seen: set[fx.Node] = set()
        found: set[fx.Node] = set()
        for operand in call.all_input_nodes:
            root = self.roots[operand]
            (found if root in seen else seen).add(root)
        return found

    def may_take(
        self, target: fx.Node, result: fx.Node, call: fx.Node, i: int, shared: Collection[fx.Node]
    ) -> fx.Node | None:
        """The node whose buffer `target` shares, if `call` may write its `result` over it; None where it may not. It is
        the result's from then on. `shared` are the roots that several of the call's operands share.

        It may where the type is the same and nobody reads the buffer again, also not through a view. A part of a larger
        buffer is not written over: the result would keep all of it. State is not written over before the commit.
        """
        if target in self.overlapping or self.is_part(target):
            return None
        a, b = tensor_type(target), tensor_type(result)
        if a.dtype != b.dtype or not same(self.graph.local_shape(a), self.graph.local_shape(b)):
            return None
        root = self.roots[target]
        if root.op == "placeholder" and (
            call in self.early or not (root.meta["kind"] == "state" and root.meta["label"] in self.replaced)
        ):
            return None
        sharing = self.members[root]
        if any(value not in self.last or self.last[value] > i for value in sharing):
            return None
        if root in shared:
            return None
        for value in sharing:
            self.roots[value] = result  # from here on the buffer is this op's result
        self.members[result] += self.members.pop(root)
        return root

    # -- writing it down --------------------------------------------------------------------------------------------

    def _source(self, source: Source) -> int:
        known = self._numbers.get(id(source))
        if known is None:
            if source.caller is not None:
                self.sources.setdefault(source.caller, len(self.sources))
            known = self._numbers[id(source)] = self.sources.setdefault(source, len(self.sources))
        return known

    def instruction(self, node: fx.Node, in_place: bool, free: tuple[int, ...]) -> Instruction:
        overwrites = in_place and node.target is not ops.kernel
        op = _inplace_overload(node.target) if overwrites else _op_name(node)
        assert op is not None
        args = tuple(self.argument(argument) for argument in args_of(node))
        kwargs = {key: self.argument(value) for key, value in node.kwargs.items()}
        of = provenance(node)
        index = -1 if of.source is None else self._source(of.source)
        for each in of.fused:
            if (line := provenance(each).source) is not None:
                self._source(line)
        return Instruction(op, args, kwargs, self.slots[node], free, index)

    def argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return Slot(self.slots[argument])
        if isinstance(argument, (list, tuple)):
            return [self.argument(each) for each in argument]
        return argument

    def value(self, node: fx.Node) -> ValueSpec:
        return ValueSpec(node.meta["kind"], node.meta["label"], tensor_type(node).unpadded, self.slots[node])


def _op_name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if node.target is ops.fill_padding and fills_in_place(node):
        return "fill_padding_"
    target: Any = node.target
    return ROW_MAJOR.get(target, str(target))


def _inplace_overload(target: Any) -> str | None:
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    overload = target._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    return f"aten.{packet.__name__}.{overload}"
