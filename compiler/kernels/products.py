"""Matrix products that take in the ops on their results, and casts and scales of their factors, for GPUs.

A product becomes a nest of the loop IR like any other, with a sum over the inner dim; whatever pointwise kernel reads
its result goes on from that sum, element by element, so an epilogue is any chain of ops that a kernel can have, and not
one of a list. A factor that a cheap pointwise kernel makes for this product alone is computed where it is read. How
such a nest runs on the matrix units is the emitter's (`compiler.kernels.triton.product`).
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.context import Context, Pass
from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.kernels.fuse import FusedKernel, alone, rewritten
from monarch.compiler.kernels.lower import LoweringContext
from monarch.compiler.kernels.lower.values import is_transparent, key_of, line_of
from monarch.compiler.kernels.tensors import tensors_of
from monarch.compiler.kernels.triton.emit import variants_of
from monarch.compiler.kernels.triton.variants import SMALLEST, ProductSize, Tiles, library_seconds
from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.contraction import contraction
from monarch.compiler.loops.ir import (
    Buffer,
    Constant,
    Index,
    Kernel,
    Load,
    Nest,
    Op,
    Position,
    Reduce,
    Statement,
    Store,
    traffic,
)
from monarch.compiler.loops.nests import renumbered
from monarch.compiler.loops.text import parse_kernel

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}
"""The products that can be nests, and the place of the first factor among their arguments."""
_ATTENTION = "attention"
"""Parts of the names of ATen's composite ops of products."""
_CHEAP = frozenset(("cast", "add", "sub", "mul"))
"""The ops that a factor's kernel may compute: it runs again for each column of tiles, or each row."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FuseProducts(Pass):
    """Put a matrix product and the kernel or op that reads it into one kernel.

        %h = aten.mm(%x, %w)                                  : bf16[64, 128]
        %k = kernel([%h, %bias], "kernel add_gelu…", [-1])    : (bf16[64, 128])
        -->
        %k = kernel([%x, %w, %bias], "kernel mm_add_gelu…", [-1]) : (bf16[64, 128])

    The product's own value is stored beside the others where somebody else reads it, which has to be later: no op is
    moved before another. Nor is a product moved past another one, for its factors would have to be kept as long. A
    cast, a sum or a product that makes a factor goes in front in the same way. The context's `templates` is "auto" (the
    least estimated time, of all these and ATen's product with kernels beside it), "all" that can be, or "off".
    """

    name = "fuse-products"

    def run(self, graph: Graph, context: Context) -> Graph:
        if context.templates == "off" or not any(node.target in _PRODUCTS for node in graph.calls):
            return graph
        made = _Products(graph, context.options.target, context.templates, context.options.rounding).run()
        return rewritten(graph, made) if made else graph


@dataclass(frozen=True)
class _Product:
    """An op that is a matrix product: its factors, [batch,] rows, inner and [batch,] inner, columns, and its
    summand."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None


@dataclass(frozen=True)
class _Before:
    """The kernel that makes a factor: one nest whose loops, cut into parts of `sizes`, run along the factor's dims
    `along`."""

    made: FusedKernel
    sizes: list[tuple[int, ...]]
    along: list[int]


class _Products:
    def __init__(self, graph: Graph, target: str, when: str, rounding: str) -> None:
        self.graph, self.target, self.when, self.rounding = graph, target, when, rounding
        self.tensors = tensors_of(graph)
        self.order = {node: at for at, node in enumerate(graph.fx.nodes)}
        self.context = LoweringContext(self.tensors, key_of, rounding, {}, graph.mesh.sizes)
        self.taken: set[fx.Node] = set()
        self.heavy = [
            self.order[node] for node in graph.calls if node.target in _PRODUCTS or _ATTENTION in key_of(node)
        ]
        fused = (each for node in graph.calls for each in provenance(node).fused)
        unfused = next((each.graph for each in fused), graph.fx)
        self.before = {node.name: node for node in unfused.nodes}
        """The nodes of the graph before fusion, by name: kernels stand for nodes of one graph."""

    def run(self) -> list[FusedKernel]:
        found = []
        for node in self.graph.calls:
            product = self.product(node)
            if product is None:
                continue
            first = min(self.readers(node), key=self.order.__getitem__, default=None)
            near = first is not None and first not in self.taken and not self.heavy_between(node, first)
            after = self.after(node, first) if first is not None and near else None
            before = {each: made for each in (product.left, product.right) if (made := self.made_by(each)) is not None}
            if (best := self.best(product, after, before)) is not None:
                found.append(best)
                self.taken.update(best.nodes)
        return found

    def product(self, node: fx.Node) -> _Product | None:
        if not isinstance(node.target, torch._ops.OpOverload) or node.target not in _PRODUCTS or node in self.taken:
            return None
        at = _PRODUCTS[node.target]
        args = args_of(node)
        if len(args) > at + 2 or any(value != 1 for value in node.kwargs.values()):  # beta, alpha, out_dtype
            return None
        left, right = args[at : at + 2]
        alike = {self.tensors[each].dtype for each in (node, left, right)}
        sizes = *self.tensors[node].shape[-2:], self.tensors[left].shape[-1]
        if len(alike) > 1 or alike.pop() not in _DTYPES or min(sizes) < SMALLEST:
            return None
        bias = args[0] if at else None
        if bias is not None and self.tensors[bias].dtype != self.tensors[node].dtype:
            return None
        return _Product(node, left, right, bias)

    def heavy_between(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether another product or attention stands between two nodes."""
        at = bisect.bisect_right(self.heavy, self.order[first])
        return at < len(self.heavy) and self.heavy[at] < self.order[last]

    def readers(self, value: fx.Node) -> Iterator[fx.Node]:
        """The readers of a value, through any views."""
        for user in value.users:
            if is_transparent(key_of(user)):
                yield from self.readers(user)
            else:
                yield user

    def kernel_of(self, node: fx.Node) -> FusedKernel | None:
        """A kernel, or an op that can be one, of one pointwise nest."""
        made = None
        if node.target is ops.kernel:
            inputs, text, _ = args_of(node)
            results = {args_of(user)[1]: user for user in node.users}
            kernel = parse_kernel(text)
            if len(results) == len(kernel.outputs):
                outputs = [results[number] for number in range(len(results))]
                made = FusedKernel(kernel, list(inputs), outputs, [node, *outputs], list(provenance(node).fused))
        elif node.op == "call_function" and node in self.tensors and node.target is not ops.random:
            made = alone(node, self.context)
        if made is None or len(made.kernel.nests) > 1 or made.kernel.nests[0].reduced or made.kernel.nests[0].sums:
            return None
        return made

    def after(self, value: fx.Node, reader: fx.Node) -> FusedKernel | None:
        """The first reader of a value as a kernel that reads it directly."""
        made = self.kernel_of(reader)
        return None if made is None or value not in made.inputs else made

    def made_by(self, factor: fx.Node) -> _Before | None:
        """The kernel that makes a factor, behind views, for no other reader: of a few sums, products and casts."""
        base = factor
        while is_transparent(key_of(base)) and base.all_input_nodes:
            base = base.all_input_nodes[0]
        node = base.all_input_nodes[0] if base.target is operator.getitem else base
        if node in self.taken or len(list(self.readers(base))) != 1:
            return None
        made = self.kernel_of(node)
        if made is None or made.outputs != [base]:
            return None
        (nest,) = made.kernel.nests
        cheap = all(
            each.name in _CHEAP if isinstance(each, Op) else not isinstance(each, Position) for each in nest.body
        )
        dims = _dims_along(nest, self.tensors[factor]) if cheap else None
        return None if dims is None else _Before(made, *dims)

    def best(
        self, product: _Product, after: FusedKernel | None, before: Mapping[fx.Node, _Before]
    ) -> FusedKernel | None:
        """The kernel with the least estimated time, together with the ops that it leaves out; None where all apart take
        less."""
        behind = 0.0 if after is None else self.pointwise(after.kernel)
        fronts = {factor: self.pointwise(each.made.kernel) for factor, each in before.items()}
        library = self.library(product)
        whole = library + behind + sum(fronts.values())
        chosen: FusedKernel | None = None
        least = whole if self.when == "auto" else math.inf
        for taken in dict.fromkeys((tuple(before), *((each,) for each in before), ())):
            for reader in (after, None):
                if reader is None and not taken:
                    continue
                found = self.together(product, reader, {each: before[each] for each in taken})
                if found is None:
                    continue
                made, tiles, seconds = found
                left = sum(time for each, time in fronts.items() if each not in taken)
                left += behind if reader is None else 0.0
                if seconds + left < least:
                    chosen, least = made, seconds + left
                    parts = [*(fronts[each] for each in taken), library]
                    names = [*(before[each].made.kernel.name for each in taken), key_of(product.node)]
                    if reader is not None:
                        parts.append(behind)
                        names.append(reader.kernel.name)
                    chosen.why = (
                        f"one kernel of {', '.join(names[:-1])} and {names[-1]}, in tiles of {tiles}: "
                        f"{seconds * 1e6:.1f} us estimated, apart "
                        f"{' + '.join(f'{each * 1e6:.1f}' for each in parts)} us"
                    )
                if self.when == "all" and chosen is not None:
                    return chosen
        return chosen

    def together(
        self, product: _Product, after: FusedKernel | None, before: Mapping[fx.Node, _Before]
    ) -> tuple[FusedKernel, Tiles, float] | None:
        """A product with the kernels before and after it, and the fastest tiles of it, with their estimate."""
        kept = after is not None and any(reader not in after.nodes for reader in self.readers(product.node))
        reader = after or _itself(product.node, self.tensors)
        joined = _Joining(self.tensors, product, reader, before, self.rounding, kept).run()
        if joined is None or contraction(joined.kernel.nests[0]) is None:
            return None
        tiles, seconds = next(iter(variants_of(joined.kernel, self.target)), (None, 0.0))
        if tiles is None:
            return None
        joined.stands_for = [self.before[each.name] for each in joined.stands_for]
        return joined, tiles, seconds

    def library(self, product: _Product) -> float:
        """The estimate for ATen's product, in seconds."""
        left, right, result = (self.tensors[each] for each in (product.left, product.right, product.node))
        moved = left.nbytes + right.nbytes + result.nbytes
        batch = result.shape[0] if len(result.shape) == 3 else 1
        rows, columns = result.shape[-2:]
        work = ProductSize(batch, rows, columns, left.shape[-1], result.dtype, moved)
        return library_seconds(work, self.target)

    def pointwise(self, kernel: Kernel) -> float:
        return MACHINES[self.target].op_seconds("f32", 0.0, sum(traffic(kernel)))


def _itself(node: fx.Node, tensors: Mapping[fx.Node, Buffer]) -> FusedKernel:
    """A kernel that does nothing to a value."""
    buffer = Buffer.contiguous(tensors[node].dtype, tensors[node].shape)
    index = Index(0, buffer.strides)
    kernel = Kernel("", (buffer,), (buffer,), (Nest(buffer.shape, 0, (Load(0, index), Store(1, index, 0))),))
    return FusedKernel(kernel, [node], [node], [], [])


class _Joining:
    """One kernel of a product, a pointwise kernel that reads it, and those that make its factors."""

    def __init__(
        self,
        tensors: dict[fx.Node, Buffer],
        product: _Product,
        after: FusedKernel,
        before: Mapping[fx.Node, _Before],
        rounding: str,
        kept: bool,
    ) -> None:
        self.tensors, self.product, self.after, self.rounding, self.kept = tensors, product, after, rounding, kept
        self.before = before
        self.body: list[Statement] = []
        self.lines: list[str] = []
        self.line = ""
        reads: list[fx.Node | None] = []
        for factor in (product.left, product.right):
            reads += before[factor].made.inputs if factor in before else [factor]
        reads += [product.bias, *after.inputs]
        self.inputs = [each for each in dict.fromkeys(reads) if each is not None and each is not product.node]
        self.outputs = [*after.outputs, *([product.node] if kept else [])]

    def add(self, statement: Statement) -> int:
        self.body.append(statement)
        self.lines.append(self.line)
        return len(self.body) - 1

    def run(self) -> FusedKernel | None:
        kernel, node = self.after.kernel, self.product.node
        (nest,) = kernel.nests
        index = _only_index(nest, self.after.inputs.index(node))
        value_of = self.tensors[node]
        cut = None if index is None or not value_of.is_contiguous else _cut(nest.dims, index, value_of.shape)
        if cut is None:
            return None
        dims, strides = cut  # of the loops, and of the product's value along them
        inner = self.tensors[self.product.left].shape[-1]
        self.dims = (*(size for parts in dims for size in parts), inner)
        self.along = (*(stride for parts in strides for stride in parts), 0)
        self.line = line_of(node)
        total, value = self.multiplied()
        place = {each: at for at, each in enumerate(self.inputs)}
        numbers: dict[int, int] = {}
        exact: set[int] = set()
        for at, statement in enumerate(nest.body):
            self.line = nest.lines[at] if nest.lines else ""
            match statement:
                case Load(buffer) if self.after.inputs[buffer] is node:
                    numbers[at] = value
                    exact.add(at)
                case Load(buffer, index):
                    numbers[at] = self.add(Load(place[self.after.inputs[buffer]], _spread(index, dims)))
                case Store(buffer, index, stored):
                    output = len(self.inputs) + buffer - len(kernel.inputs)
                    self.add(Store(output, _spread(index, dims), numbers[stored]))
                case Position(dim):
                    numbers[at] = self.position(dims, dim)
                case Op("cast", (arg,), torch.float32) if arg in exact and self.rounding == "chain":
                    numbers[at] = total
                case _:
                    numbers[at] = self.add(renumbered(statement, numbers))
        if self.kept:
            self.add(Store(len(self.inputs) + len(kernel.outputs), Index(0, self.along), value))
        packet = key_of(node).rpartition(".")[2]
        names = [*(each.made.kernel.name for each in self.before.values()), packet, kernel.name]
        made = Kernel(
            "_".join(names)[:60].strip("_"),
            tuple(self.tensors[each] for each in self.inputs),
            tuple(self.tensors[each] for each in self.outputs),
            (Nest(self.dims, 1, tuple(self.body), tuple(self.lines) if any(self.lines) else ()),),
        )
        check_kernel(made)
        fronts = [each.made for each in self.before.values()]
        nodes = [each for front in fronts for each in front.nodes] + [node, *self.after.nodes]
        stands_for = [each for front in fronts for each in front.stands_for] + [node, *self.after.stands_for]
        return FusedKernel(made, self.inputs, self.outputs, nodes, stands_for)

    def multiplied(self) -> tuple[int, int]:
        """The sums in f32, with their summands, and the product's value, rounded to its dtype."""
        product, result = self.product, self.tensors[self.product.node]
        factors = self.factor(product.left, -1), self.factor(product.right, -2)
        products = self.add(Op("mul", factors, torch.float32))
        total = self.add(Reduce("sum", products))
        if product.bias is not None:
            bias = self.tensors[product.bias]
            strides = [0] * (len(result.shape) - len(bias.shape))
            strides += [stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.strides, strict=True)]
            added = self.wide(self.add(Load(self.inputs.index(product.bias), Index(0, self.steps(strides, 0)))), bias)
            total = self.add(Op("add", (total, added), torch.float32))
        value = total if result.dtype == torch.float32 else self.add(Op("cast", (total,), result.dtype))
        return total, value

    def factor(self, node: fx.Node, inner: int) -> int:
        """A factor in f32, loaded or computed; `inner` says which of its dims is the inner one, from the end."""

        def steps(strides: Sequence[int]) -> tuple[int, ...]:
            outer = list(strides)
            outer[inner] = 0
            return self.steps(outer, strides[inner])

        buffer = self.tensors[node]
        if node not in self.before:
            return self.wide(self.add(Load(self.inputs.index(node), Index(0, steps(buffer.strides)))), buffer)
        before = self.before[node]
        kernel, line = before.made.kernel, self.line
        numbers: dict[int, int] = {}
        value = -1
        for at, statement in enumerate(kernel.nests[0].body):
            self.line = kernel.nests[0].lines[at] if kernel.nests[0].lines else line
            match statement:
                case Load(read, index):
                    strides = [0] * len(buffer.shape)
                    for dim, stride in zip(before.along, _spread(index, before.sizes).strides, strict=False):
                        if dim >= 0:
                            strides[dim] = stride
                    place = self.inputs.index(before.made.inputs[read])
                    numbers[at] = self.add(Load(place, Index(index.offset, steps(strides))))
                case Store(_, _, stored):
                    value = numbers[stored]
                case _:
                    numbers[at] = self.add(renumbered(statement, numbers))
        self.line = line
        return self.wide(value, buffer)

    def wide(self, value: int, of: Buffer) -> int:
        """A value of a tensor in f32."""
        return value if of.dtype == torch.float32 else self.add(Op("cast", (value,), torch.float32))

    def steps(self, strides: Sequence[int], inner: int) -> tuple[int, ...]:
        """The strides along the loops from those along the dims of the product's value, and the inner dim."""
        shape = self.tensors[self.product.node].shape
        steps = []
        for stride in self.along[:-1]:
            whole, found = 1, 0
            for size, step in zip(reversed(shape), reversed(strides), strict=True):
                if stride % whole == 0 and stride < whole * size:
                    found = step * (stride // whole)
                whole *= size
            steps.append(found)
        return (*steps, inner)

    def position(self, dims: Sequence[Sequence[int]], dim: int) -> int:
        """The position along a dim that may have been cut."""
        first = sum(len(parts) for parts in dims[:dim])
        found = self.add(Position(first))
        for at, size in enumerate(dims[dim][1:], first + 1):
            scaled = self.add(Op("mul", (found, self.add(Constant(size, torch.int64))), torch.int64))
            found = self.add(Op("add", (scaled, self.add(Position(at))), torch.int64))
        return found


def _only_index(nest: Nest, buffer: int) -> Index | None:
    """The index at which a nest loads a buffer; None where there are several, or another is not known beforehand."""
    indices = {statement.index for statement in nest.body if isinstance(statement, Load) and statement.buffer == buffer}
    gathers = any(isinstance(statement, Load) and statement.gather >= 0 for statement in nest.body)
    return indices.pop() if len(indices) == 1 and not gathers else None


def _dims_along(nest: Nest, factor: Buffer) -> tuple[list[tuple[int, ...]], list[int]] | None:
    """The loops of a nest cut so that each part runs along one dim of a factor that is a view of the nest's result: the
    sizes of the parts, and the dim of each, -1 for a part of one step. None where the two do not fit so."""
    stores = [statement.index for statement in nest.body if isinstance(statement, Store)]
    if any(isinstance(statement, Load) and statement.gather >= 0 for statement in nest.body):
        return None
    dims = sorted((dim for dim, size in enumerate(factor.shape) if size > 1), key=lambda dim: -factor.strides[dim])
    cut = _cut(nest.dims, stores[0], [factor.shape[dim] for dim in dims])
    if cut is None:
        return None
    along = []
    for sizes, strides in zip(*cut, strict=True):
        for size, stride in zip(sizes, strides, strict=True):
            found = [dim for dim in dims if (factor.shape[dim], factor.strides[dim]) == (size, stride)]
            if size > 1 and len(found) != 1:
                return None
            along.append(found[0] if size > 1 else -1)
    return cut[0], along


def _cut(
    dims: Sequence[int], index: Index, shape: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """Loops cut so that each part runs along one dim of a contiguous value of `shape` that is accessed at `index`: for
    each loop the sizes of its parts, and their strides in the value. None where not every element is met once."""
    order = sorted((dim for dim, size in enumerate(dims) if size > 1), key=lambda dim: index.strides[dim])
    reach = 1
    for dim in order:
        if index.strides[dim] != reach:
            return None
        reach *= dims[dim]
    if index.offset or reach != math.prod(shape):
        return None
    ends, whole = [], 1
    for size in reversed(shape):
        whole *= size
        ends.append(whole)
    sizes: list[tuple[int, ...]] = []
    strides: list[tuple[int, ...]] = []
    for size, stride in zip(dims, index.strides, strict=True):
        parts: list[int] = []
        steps: list[int] = []
        left, step = size, stride
        if size > 1:
            for end in (each for each in ends if stride < each < stride * size):
                part = end // step
                if end % step or left % part:
                    return None
                parts, steps, left, step = [part, *parts], [step, *steps], left // part, end
        sizes.append((left, *parts))
        strides.append((step if size > 1 else 0, *steps))
    return sizes, strides


def _spread(index: Index, dims: Sequence[Sequence[int]]) -> Index:
    """An index over loops that were cut; the product's inner dim, last, it does not move along."""
    strides: list[int] = []
    for stride, parts in zip(index.strides, dims, strict=True):
        steps = []
        for size in reversed(parts):
            steps.append(stride)
            stride *= size
        strides += reversed(steps)
    return Index(index.offset, (*strides, 0))
