"""The last step: from a partitioned graph to the plan that workers run."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.work import graph_costs, local_bytes
from monarch.compiler.errors import Source
from monarch.compiler.graph import Graph, args_of, tensor_type
from monarch.compiler.loops.ir import may_overwrite
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.ops.record import enter, of_packet
from monarch.compiler.ops.schema import viewed_operand
from monarch.compiler.plan.file import hash_of
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Instruction, Plan, Slot, ValueSpec
from monarch.compiler.schedule.arena import Placing, lower_bound
from monarch.compiler.schedule.failing import before_the_commit
from monarch.compiler.types import TensorType

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


def emit_plan(graph: Graph, options: CompileOptions) -> Plan:
    """Lower a partitioned graph: slots, lifetimes, writes in place, and the commit point.

    The graph gets a copy of each result that would share another's buffer; the plan then has an instruction for each of
    its calls, in their order, and one "commit" where a step writes over state.
    """
    return _Emitter(graph, options).run()


def state_writers(graph: Graph) -> list[int]:
    """The positions of the calls that a plan of the graph has write over state. The graph is changed as by
    `emit_plan`."""
    emitter = _Emitter(graph, CompileOptions())
    emitter.walk()
    return emitter.state_writers


@dataclass
class _Emitter:
    graph: Graph
    options: CompileOptions
    slots: dict[fx.Node, int] = field(default_factory=dict)
    roots: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The node whose buffer a value shares: views share the buffer of what they view."""
    members: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    overlapping: set[fx.Node] = field(default_factory=set)
    """Values whose elements share memory (expand): never written in place."""
    sources: dict[Source, int] = field(default_factory=dict)
    early: set[fx.Node] = field(default_factory=set)
    """Calls that run before the commit, because they or a reader of their results can fail."""
    state_writers: list[int] = field(default_factory=list)

    def walk(self) -> tuple[list[fx.Node], dict[fx.Node, int], list[Instruction]]:
        """The calls, the last use of each value that is no result, and the instructions, with no place in the arena."""
        graph = self.graph
        self.find_roots()
        self.copy_shared_results()
        for value, root in self.roots.items():
            self.members.setdefault(root, []).append(value)
        calls = list(graph.calls)
        self.early = before_the_commit(calls)
        for i, node in enumerate((*graph.placeholders, *calls)):
            self.slots[node] = i
        last = self.last_uses(calls)
        replaced = graph.states.keys() & graph.updates.keys()
        free: dict[int, list[int]] = {}
        for value, at in last.items():
            free.setdefault(at, []).append(self.slots[value])
        instructions: list[Instruction] = []
        for i, node in enumerate(calls):
            written = self.written(node, i, last, replaced)
            if any(root.op == "placeholder" for root in written):
                if not self.state_writers:
                    instructions.append(Instruction("commit", (), {}, -1))
                self.state_writers.append(i)
            instructions.append(self.instruction(node, bool(written), tuple(sorted(free.get(i, ())))))
        return calls, last, instructions

    def run(self) -> Plan:
        graph = self.graph
        calls, last, instructions = self.walk()
        replaced = graph.states.keys() & graph.updates.keys()
        costs = graph_costs(graph)
        arena = 0
        if self.options.target == "cpu":
            placing = Placing(graph, calls, self.roots, self.members, last)
            arena, instructions = placing.run(instructions)
            costs["arena"] = {"bytes": arena, "least": lower_bound(placing.spans), "values": len(placing.spans)}
        inputs = [p for p in graph.placeholders if p.meta["kind"] != "constant"]
        plan = Plan(
            name=graph.name,
            mesh=graph.mesh,
            inputs=tuple(self.spec(p) for p in inputs),
            outputs=tuple(self.outputs()),
            instructions=tuple(instructions),
            slots=len(self.slots),
            donated=tuple(p.meta["kind"] == "state" and p.meta["label"] in replaced for p in inputs),
            constants=dict(graph.constants),
            constant_slots={p.meta["label"]: self.slots[p] for p in graph.placeholders if p.meta["kind"] == "constant"},
            sources=tuple(self.sources),
            options=self.options,
            arena=arena,
            graph=str(graph),
            costs=costs,
        )
        return replace(plan, hash=hash_of(plan))

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
                    copy = graph.call(aten.clone.default, node, type=node.meta["type"], source=node.meta.get("source"))
                self.roots[copy] = copy
                return copy
            taken[root] = label
            return node

        updates = {label: own(node, label) for label, node in updates.items()}
        returns = [node and own(node, "") for node in returns]
        graph.set_output(returns, updates)

    def is_part(self, value: fx.Node) -> bool:
        """Whether a value is a view of less than the whole buffer that it lies in."""
        return local_bytes(self.graph, tensor_type(value)) < local_bytes(self.graph, self.roots[value].meta["type"])

    def last_uses(self, calls: list[fx.Node]) -> dict[fx.Node, int]:
        """For each value that is no result, the position of the call after which nobody reads it."""
        last: dict[fx.Node, int] = dict.fromkeys(self.graph.placeholders, -1)
        for i, node in enumerate(calls):
            last[node] = i
            for operand in node.all_input_nodes:
                last[operand] = i
        for result in (*self.graph.returns, *self.graph.updates.values()):
            if result is not None:
                last.pop(result, None)
        return last

    def written(self, node: fx.Node, i: int, last: dict[fx.Node, int], replaced: set[str]) -> list[fx.Node]:
        """The nodes whose buffers the op writes its results over: that of its first operand for ATen's in-place ops, of
        any operand for a kernel, which is told so."""
        if node.target is ops.kernel:
            return self.written_by_kernel(node, i, last, replaced)
        packet = getattr(node.target, "overloadpacket", None)
        if packet is None or not of_packet(packet, "in_place") or _inplace_overload(node.target) is None:
            return []
        target = args_of(node)[0]
        if not isinstance(target, fx.Node):
            return []
        root = self.may_take(target, node, node, i, last, replaced)
        return [] if root is None else [root]

    def written_by_kernel(self, node: fx.Node, i: int, last: dict[fx.Node, int], replaced: set[str]) -> list[fx.Node]:
        tensors, text, over = args_of(node)
        kernel = parse_kernel(text)
        results = {args_of(user)[1]: user for user in node.users}
        over, roots = list(over), []
        for output, result in sorted(results.items()):
            for at, operand in enumerate(tensors):
                if at in over or not may_overwrite(kernel, output, at):
                    continue
                root = self.may_take(operand, result, node, i, last, replaced)
                if root is not None:
                    over[output] = at
                    roots.append(root)
                    break
        node.args = (tensors, text, over)
        return roots

    def may_take(
        self, target: fx.Node, result: fx.Node, call: fx.Node, i: int, last: dict[fx.Node, int], replaced: set[str]
    ) -> fx.Node | None:
        """The node whose buffer `target` shares, if `call` may write its `result` over it; None where it may not. It is
        the result's from then on.

        It may where the type is the same and nobody reads the buffer again, also not through a view. A part of a larger
        buffer is not written over: the result would keep all of it. State is not written over before the commit.
        """
        if target in self.overlapping or self.is_part(target):
            return None
        a, b = tensor_type(target), tensor_type(result)
        if a.dtype != b.dtype or self.graph.local_shape(a) != self.graph.local_shape(b):
            return None
        root = self.roots[target]
        if root.op == "placeholder" and (
            call in self.early or not (root.meta["kind"] == "state" and root.meta["label"] in replaced)
        ):
            return None
        sharing = self.members[root]
        if any(value not in last or last[value] > i for value in sharing):
            return None
        if any(operand is not target and self.roots[operand] is root for operand in call.all_input_nodes):
            return None
        for value in sharing:
            self.roots[value] = result  # from here on the buffer is this op's result
        self.members[result] += self.members.pop(root)
        return root

    # -- writing it down --------------------------------------------------------------------------------------------

    def instruction(self, node: fx.Node, in_place: bool, free: tuple[int, ...]) -> Instruction:
        overwrites = in_place and node.target is not ops.kernel
        op = _inplace_overload(node.target) if overwrites else _op_name(node.target)
        assert op is not None
        args = tuple(self.argument(argument) for argument in args_of(node))
        kwargs = {key: self.argument(value) for key, value in node.kwargs.items()}
        source = node.meta.get("source")
        index = -1 if source is None else self.sources.setdefault(source, len(self.sources))
        for each in node.meta.get("fused", ()):
            if each.meta.get("source") is not None:
                self.sources.setdefault(each.meta["source"], len(self.sources))
        return Instruction(op, args, kwargs, self.slots[node], free, index)

    def argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return Slot(self.slots[argument])
        if isinstance(argument, (list, tuple)):
            return [self.argument(each) for each in argument]
        return argument

    def spec(self, node: fx.Node) -> ValueSpec:
        return ValueSpec(node.meta["kind"], node.meta["label"], tensor_type(node), self.slots[node])

    def outputs(self) -> Iterator[ValueSpec]:
        states = self.graph.states
        for i, node in enumerate(node for node in self.graph.returns if node is not None):
            yield ValueSpec("return", i, tensor_type(node), self.slots[node])
        for label, node in self.graph.updates.items():
            type_: TensorType = states.get(label, tensor_type(node))
            yield ValueSpec("state", label, type_, self.slots[node])


def _op_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    return ROW_MAJOR.get(target, str(target))


def _inplace_overload(target: Any) -> str | None:
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    overload = target._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    return f"aten.{packet.__name__}.{overload}"
