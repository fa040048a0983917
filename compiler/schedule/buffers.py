"""A worker's memory as a graph runs: buffers, the values in them, and their readers."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.cost.work import local_bytes, node_work
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.ops.schema import viewed_operand
from monarch.compiler.rules.call import argument
from monarch.compiler.schedule.footprint import footprint
from monarch.compiler.schedule.schedule import Schedule


@dataclass(eq=False)
class Buffer:
    """The memory of a value and of all that view it.

    `uses`    the positions of the calls that read one of its values, in order
    `result`  whether it holds a result of the graph, and so lives to the end
    """

    name: str
    size: int
    uses: list[int] = field(default_factory=list)
    result: bool = False

    def next_use(self, after: int) -> int | None:
        """The first position of a reader past `after`."""
        return next((at for at in self.uses if at > after), None)

    @property
    def last_use(self) -> int:
        return self.uses[-1] if self.uses else -1


class Buffers:
    """The buffers of a graph's calls, and a worker's memory, as its schedule has it.

    `calls`     the graph's calls in order; a call's place in this list is its position
    `of`        for each value its buffer: None for one in an input's memory
    `elements`  for each call with several results, the buffers of these
    `copies`    for each view, whether it had to copy
    `takes`     bytes that a call takes, and `gives` those that are free behind it, by position
    `start`     bytes that are held before the first call
    `seconds`   estimated time of each call
    """

    def __init__(self, graph: Graph, cluster: Cluster) -> None:
        self.graph = graph
        self.calls = list(graph.calls)
        self.position = {node: at for at, node in enumerate(self.calls)}
        schedule = Schedule(graph.copy())
        memory = footprint(schedule)
        self.start = sum(memory.inputs.values())
        self.peak = memory.peak[0]
        self.takes: list[int] = []
        self.gives: list[int] = []
        before = 0
        for number, instruction in enumerate(schedule.instructions):
            if instruction.op == "commit":
                before = memory.gives[number]
                continue
            self.takes.append(memory.takes[number])
            self.gives.append(memory.gives[number] + before)
            before = 0
        self.seconds = [node_work(graph, node, cluster, self.takes[at]).seconds for at, node in enumerate(self.calls)]
        self.of: dict[fx.Node, Buffer | None] = dict.fromkeys(graph.placeholders)
        self.elements: dict[fx.Node, list[Buffer | None]] = {}
        self.viewed: dict[fx.Node, fx.Node] = {}
        for at, node in enumerate(self.calls):
            self._place(at, node)
        for at, node in enumerate(self.calls):
            if node.target is not operator.getitem:
                for operand in node.all_input_nodes:
                    buffer = self.of.get(operand)
                    if buffer is not None:
                        buffer.uses.append(at)
        for result in (*graph.returns, *graph.updates.values()):
            if result is not None and (buffer := self.of.get(result)) is not None:
                buffer.result = True

    def _place(self, at: int, node: fx.Node) -> None:
        viewed = viewed_operand(node)
        type_ = node.meta["type"]
        if node.target is ops.wait:
            self.elements[node] = self.elements[args_of(node)[0]]
        elif node.target is operator.getitem:
            producer, index = args_of(node)
            self.of[node] = self.elements[producer][index]
        elif viewed is not None and not self.takes[at]:
            self.viewed[node] = viewed
            if isinstance(type_, tuple):
                self.elements[node] = [self.of[viewed]] * len(type_)
            else:
                self.of[node] = self.of[viewed]
        elif isinstance(type_, tuple):
            self.elements[node] = [Buffer(node.name, local_bytes(self.graph, each)) for each in type_]
        elif type_ is not None:
            self.of[node] = Buffer(node.name, self.takes[at] or local_bytes(self.graph, type_))

    def made(self, node: fx.Node) -> list[Buffer | None]:
        """The buffers of a call's results."""
        return self.elements[node] if node in self.elements else [self.of.get(node)]


def peak_of(graph: Graph) -> int:
    """The most that a worker holds as it runs a graph, in bytes. The argument is not changed."""
    return footprint(Schedule(graph.copy())).peak[0]


def repeatable(call: fx.Node) -> bool:
    """Whether a call gives the same bits when it is made once more on one worker alone: everything but collectives, and
    ATen's own random ops (ours count from the global index). Attention is one of these only with dropout."""
    if isinstance(call.target, ops.MonarchOp):
        return not call.target.collective and call.target not in (ops.send, ops.recv)
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return True
    return argument(call, "dropout_p") == 0.0
