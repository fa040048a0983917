"""Which kernels become one of several nests: those that do the same to different tensors, such as an optimizer's
updates of many parameters, and do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from monarch.compiler import ops
from monarch.compiler.alike import Memo
from monarch.compiler.config import settings
from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.kernels.fuse import is_heavy
from monarch.compiler.kernels.lower.values import key_of
from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.ir import MOST_STATEMENTS, Buffer, Kernel, Load, Nest, Store
from monarch.compiler.loops.text import parse_kernel, print_checked


class JoinKernels(Pass):
    """Make one kernel of those that do the same to different tensors, where nothing else stands between them.

        %k = kernel([%a, %g], "kernel sub(a0: f32[8], a1: f32[8]) -> (b0: f32[8])…", [-1])    : (f32[8])
        %c = getitem(%k, 0)                                                                   : f32[8]
        %l = kernel([%b, %h], "kernel sub(a0: f32[6], a1: f32[6]) -> (b0: f32[6])…", [-1])    : (f32[6])
        %d = getitem(%l, 0)                                                                   : f32[6]
        -->
        %k = kernel([%a, %g, %b, %h], "kernel sub_x2(…) -> (b0: f32[8], b1: f32[6])…", [-1, -1])  : (f32[8], f32[6])
        %c = getitem(%k, 0)                                                                   : f32[8]
        %d = getitem(%k, 1)                                                                   : f32[6]

    What stands between the first and the last of one kernel has run when it does. Nothing does between updates; between
    the norms of two layers there are matrix products, past which their operands would have to be kept. So kernels are
    joined between collectives and ops that compute much.
    """

    name = "join-kernels"

    def run(self, graph: Graph, context: Context) -> Graph:
        at: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.fx.nodes)}
        shelves = [shelf for shelf in _shelves(graph) if len(shelf) > 1]
        for shelf in shelves:
            for some in _in_bounds(shelf):
                _join(graph, some, at)
        if shelves:
            graph.reorder(at)
        return graph


@dataclass
class _Stretch:
    """The calls between two ops that no kernel is joined across. Kernels that are one from now on are a shelf, and have
    one number."""

    shelves: list[list[fx.Node]] = field(default_factory=list)
    shapes: dict[object, list[int]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)
    """For each shelf a bit for each that it depends on, also through others."""
    behind: dict[fx.Node, int] = field(default_factory=dict)
    """For each value a bit for each shelf that it depends on, but not for those that these came to depend on since."""

    def add(self, node: fx.Node) -> None:
        if not self.behind and node.target is not ops.kernel:
            return
        found = 0
        for operand in node.all_input_nodes:
            found |= self.behind.get(operand, 0)
        if node.target is ops.kernel and len((kernel := parse_kernel(args_of(node)[1])).nests) == 1:
            found = 1 << self.shelve(node, _shape_of(args_of(node)[1], kernel.nests[0]), found)
        if found:
            self.behind[node] = found

    def shelve(self, node: fx.Node, shape: object, found: int) -> int:
        """The number of the shelf that a kernel is put on, whose operands depend on those `found`."""
        for number, before in enumerate(self.before):
            if found >> number & 1:
                found |= before
        alike = self.shapes.setdefault(shape, [])
        for number in alike:
            if not found >> number & 1:
                self.shelves[number].append(node)
                for other, before in enumerate(self.before):
                    if other == number or before >> number & 1:
                        self.before[other] |= found
                return number
        alike.append(len(self.shelves))
        self.shelves.append([node])
        self.before.append(found)
        return alike[-1]


def _shelves(graph: Graph) -> list[list[fx.Node]]:
    stretches = [_Stretch()]
    borders: dict[Any, bool] = {}
    for node in graph.calls:
        if (border := borders.get(node.target)) is None:
            crossing = ops.is_collective(node.target) or node.target in (ops.send, ops.recv)
            border = borders[node.target] = crossing or is_heavy(node, key_of(node))
        if border:
            stretches.append(_Stretch())
        else:
            stretches[-1].add(node)
    return [shelf for stretch in stretches for shelf in stretch.shelves]


def _in_bounds(shelf: Sequence[fx.Node]) -> Iterator[Sequence[fx.Node]]:
    """The kernels of a shelf, as many at a time as one kernel has room for the statements of. They have equally
    many."""
    of_each = len(parse_kernel(args_of(shelf[0])[1]).nests[0].body)
    most = max(1, MOST_STATEMENTS // of_each)
    for start in range(0, len(shelf), most):
        if len(some := shelf[start : start + most]) > 1:
            yield some


def _join(graph: Graph, shelf: Sequence[fx.Node], at: dict[fx.Node, float]) -> None:
    """Let the first kernel do what all do, where the last one stands, and all their results be its."""
    joined, *others = shelf
    kernels = [parse_kernel(args_of(node)[1]) for node in shelf]
    reads = list(dict.fromkeys(tensor for node in shelf for tensor in args_of(node)[0]))
    place = {tensor: number for number, tensor in enumerate(reads)}
    inputs: dict[fx.Node, Buffer] = {}
    nests: list[Nest] = []
    types: list[object] = []
    over: list[int] = []
    position = max(at[node] for node in shelf)
    for node, kernel in zip(shelf, kernels, strict=True):
        tensors, _, written_over = args_of(node)
        inputs.update(zip(tensors, kernel.inputs, strict=True))
        written = range(len(reads) + len(types), len(reads) + len(types) + len(kernel.outputs))
        numbers = (*(place[tensor] for tensor in tensors), *written)
        nests.append(kernel.nests[0].on_buffers(numbers))
        for result in list(node.users):
            result.args = (joined, len(types) + args_of(result)[1])
            at[result] = position
        types += node.meta["type"]
        over += [-1 if number < 0 else numbers[number] for number in written_over]
    kernel = Kernel(
        f"{kernels[0].name}_x{len(shelf)}",
        tuple([inputs[tensor] for tensor in reads]),
        tuple([buffer for each in kernels for buffer in each.outputs]),
        tuple(nests),
        any(each.sized for each in kernels),
    )
    if settings.verify:  # each was checked when it was read, and workers check their plans
        check_kernel(kernel)
    joined.args = (reads, print_checked(kernel), over)
    joined.meta["type"] = tuple(types)
    fused = [each for node in shelf for each in provenance(node).fused]
    joined.meta["provenance"] = replace(provenance(joined), fused=tuple(fused))
    at[joined] = position
    for node in others:
        graph.fx.erase_node(node)


_SHAPES: Memo[tuple[object, ...]] = Memo(1024)


def _shape_of(text: str, nest: Nest) -> tuple[object, ...]:
    """The common part of nests that do the same to other tensors: all but sizes, strides and which buffers. `text` is
    that of the kernel whose nest it is."""
    if (known := _SHAPES.get(text)) is not None:
        return known
    body: list[object] = []
    for statement in nest.body:
        if isinstance(statement, (Load, Store)):
            moving = tuple(stride > 0 for stride in statement.index.strides)
            value = statement.value if isinstance(statement, Store) else statement.gather
            body.append((type(statement).__name__, moving, value, isinstance(statement, Store) and statement.sums))
        else:
            body.append((type(statement).__name__, repr(statement)))
    return _SHAPES.keep(text, (len(nest.dims), nest.reduced, tuple(body)))
