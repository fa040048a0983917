"""Matrix products that take in what is computed from them, for GPUs.

A product becomes a nest of the loop IR like any other, with a sum over the inner dim; whatever pointwise kernel reads
its result goes on from that sum, element by element, so an epilogue is any chain of ops that a kernel can have, and not
one of a list. How such a nest runs on the matrix units is the emitter's (`compiler.kernels.triton.product`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.inspect.estimate import op_seconds
from monarch.compiler.kernels.check import check_kernel
from monarch.compiler.kernels.contraction import contraction
from monarch.compiler.kernels.fuse import Made, alone, key_of, rewritten
from monarch.compiler.kernels.ir import (
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
from monarch.compiler.kernels.lower import Given
from monarch.compiler.kernels.lower.values import TRANSPARENT, line_of
from monarch.compiler.kernels.nests import renumbered
from monarch.compiler.kernels.tensors import tensors_of
from monarch.compiler.kernels.text import parse_kernel
from monarch.compiler.kernels.triton.emit import variants_of
from monarch.compiler.kernels.triton.variants import SMALLEST, Work, library_seconds
from monarch.compiler.passes.base import Pass

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}
"""The products that can be nests, and the place of the first factor among their arguments."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FuseProducts(Pass):
    """Put a matrix product and the kernel or op that reads it into one kernel.

        %h = aten.mm(%x, %w)                                  : bf16[64, 128]
        %k = kernel([%h, %bias], "kernel add_gelu…", [-1])    : (bf16[64, 128])
        -->
        %k = kernel([%x, %w, %bias], "kernel mm_add_gelu…", [-1]) : (bf16[64, 128])

    The product's own value is stored beside the others where somebody else reads it, which has to be later: no op is
    moved before another. `when` is "auto" (where the estimate for one launch is below that for ATen's product and a
    kernel), "all" that can be, or "off".
    """

    name = "fuse-products"

    def __init__(self, target: str, when: str = "auto", rounding: str = "eager") -> None:
        self.target, self.when, self.rounding = target, when, rounding

    def run(self, graph: Graph) -> Graph:
        if self.when == "off" or not any(node.target in _PRODUCTS for node in graph.calls):
            return graph
        made = _Products(graph, self.target, self.when, self.rounding).run()
        return rewritten(graph, made) if made else graph


@dataclass(frozen=True)
class _Product:
    """An op that is a matrix product: its factors, [batch,] rows, inner and [batch,] inner, columns, and what it
    adds."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None


class _Products:
    def __init__(self, graph: Graph, target: str, when: str, rounding: str) -> None:
        self.graph, self.target, self.when, self.rounding = graph, target, when, rounding
        self.tensors = tensors_of(graph)
        self.order = {node: at for at, node in enumerate(graph.fx.nodes)}
        self.given = Given(self.tensors, key_of, rounding, {}, graph.mesh.sizes)
        self.taken: set[fx.Node] = set()
        fused = (each for node in graph.calls for each in node.meta.get("fused", ()))
        unfused = next((each.graph for each in fused), graph.fx)
        self.before = {node.name: node for node in unfused.nodes}
        """The nodes of the graph before fusion, by name: what kernels stand for is of one graph."""

    def run(self) -> list[Made]:
        found = []
        for node in self.graph.calls:
            product = self.product(node)
            if product is None:
                continue
            first = min(self.readers(node), key=self.order.__getitem__, default=None)
            after = None if first is None or first in self.taken else self.after(node, first)
            made = None if after is None else self.together(product, after)
            if made is not None:
                found.append(made)
                self.taken.update(made.nodes)
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

    def readers(self, value: fx.Node) -> Iterator[fx.Node]:
        """Who reads a value, through whatever views."""
        for user in value.users:
            if key_of(user) in TRANSPARENT:
                yield from self.readers(user)
            else:
                yield user

    def after(self, value: fx.Node, reader: fx.Node) -> Made | None:
        """The first reader of a value as a kernel of one pointwise nest that reads it directly."""
        made = None
        if reader.target is ops.kernel:
            inputs, text, _ = args_of(reader)
            results = {args_of(user)[1]: user for user in reader.users}
            kernel = parse_kernel(text)
            if len(results) == len(kernel.outputs):
                outputs = [results[number] for number in range(len(results))]
                stands_for = list(reader.meta.get("fused", ()))
                made = Made(kernel, list(inputs), outputs, [reader, *outputs], stands_for)
        elif reader.op == "call_function" and reader in self.tensors and reader.target is not ops.random:
            made = alone(reader, self.given)
        if made is None or len(made.kernel.nests) > 1 or made.kernel.nests[0].reduced or value not in made.inputs:
            return None
        return made

    def together(self, product: _Product, after: Made) -> Made | None:
        kept = any(reader not in after.nodes for reader in self.readers(product.node))
        joined = _Joining(self.tensors, product, after, self.rounding, kept).run()
        if joined is None or contraction(joined.kernel.nests[0]) is None:
            return None
        variants = variants_of(joined.kernel, self.target)
        if not variants:
            return None
        tiles, seconds = variants[0]
        alone, apart = self.library(product), self.pointwise(after.kernel)
        if self.when == "auto" and seconds >= alone + apart:
            return None
        joined.stands_for = [self.before[each.name] for each in joined.stands_for]
        joined.why = (
            f"one kernel of {key_of(product.node)} and {after.kernel.name}, in tiles of {tiles}: "
            f"{seconds * 1e6:.1f} us estimated, apart {alone * 1e6:.1f} + {apart * 1e6:.1f} us"
        )
        return joined

    def library(self, product: _Product) -> float:
        """The estimate for ATen's product, in seconds."""
        left, right, result = (self.tensors[each] for each in (product.left, product.right, product.node))
        moved = left.nbytes + right.nbytes + result.nbytes
        batch = result.shape[0] if len(result.shape) == 3 else 1
        rows, columns = result.shape[-2:]
        work = Work(batch, rows, columns, left.shape[-1], result.dtype, moved)
        return library_seconds(work, self.target)

    def pointwise(self, kernel: Kernel) -> float:
        return op_seconds(self.target, torch.float32, 0.0, sum(traffic(kernel)))


class _Joining:
    """One kernel of a product and a pointwise kernel that reads it."""

    def __init__(
        self, tensors: dict[fx.Node, Buffer], product: _Product, after: Made, rounding: str, kept: bool
    ) -> None:
        self.tensors, self.product, self.after, self.rounding, self.kept = tensors, product, after, rounding, kept
        self.body: list[Statement] = []
        self.lines: list[str] = []
        self.line = ""
        reads = [product.left, product.right, product.bias, *after.inputs]
        self.inputs = [each for each in dict.fromkeys(reads) if each is not None and each is not product.node]
        self.outputs = [*after.outputs, *([product.node] if kept else [])]

    def add(self, statement: Statement) -> int:
        self.body.append(statement)
        self.lines.append(self.line)
        return len(self.body) - 1

    def run(self) -> Made | None:
        kernel, node = self.after.kernel, self.product.node
        (nest,) = kernel.nests
        cut = _cut(nest, self.after.inputs.index(node), self.tensors[node])
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
        made = Kernel(
            f"{packet}_{kernel.name}"[:60].strip("_"),
            tuple(self.tensors[each] for each in self.inputs),
            tuple(self.tensors[each] for each in self.outputs),
            (Nest(self.dims, 1, tuple(self.body), tuple(self.lines) if any(self.lines) else ()),),
        )
        check_kernel(made)
        nodes = [node, *self.after.nodes]
        return Made(made, self.inputs, self.outputs, nodes, [node, *self.after.stands_for])

    def multiplied(self) -> tuple[int, int]:
        """The sums in f32, with what is added to them, and the product's value, rounded to its dtype."""
        product, result = self.product, self.tensors[self.product.node]
        left, right = self.tensors[product.left], self.tensors[product.right]
        *batch, row, inner = left.strides
        factors = [self.wide(product.left, (*batch, row, 0), inner)]
        *batch, inner, column = right.strides
        factors.append(self.wide(product.right, (*batch, 0, column), inner))
        products = self.add(Op("mul", (factors[0], factors[1]), torch.float32))
        total = self.add(Reduce("sum", products))
        if product.bias is not None:
            bias = self.tensors[product.bias]
            strides = [0] * (len(result.shape) - len(bias.shape))
            strides += [stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.strides, strict=True)]
            total = self.add(Op("add", (total, self.wide(product.bias, strides, 0)), torch.float32))
        value = total if result.dtype == torch.float32 else self.add(Op("cast", (total,), result.dtype))
        return total, value

    def wide(self, node: fx.Node, strides: Sequence[int], inner: int) -> int:
        """An operand in f32, from its strides along the dims of the product's value and the inner dim."""
        shape = self.tensors[self.product.node].shape
        steps = []
        for stride in self.along[:-1]:
            whole, found = 1, 0
            for size, step in zip(reversed(shape), reversed(strides), strict=True):
                if stride % whole == 0 and stride < whole * size:
                    found = step * (stride // whole)
                whole *= size
            steps.append(found)
        loaded = self.add(Load(self.inputs.index(node), Index(0, (*steps, inner))))
        if self.tensors[node].dtype == torch.float32:
            return loaded
        return self.add(Op("cast", (loaded,), torch.float32))

    def position(self, dims: Sequence[Sequence[int]], dim: int) -> int:
        """The position along a dim that may have been cut."""
        first = sum(len(parts) for parts in dims[:dim])
        found = self.add(Position(first))
        for at, size in enumerate(dims[dim][1:], first + 1):
            scaled = self.add(Op("mul", (found, self.add(Constant(size, torch.int64))), torch.int64))
            found = self.add(Op("add", (scaled, self.add(Position(at))), torch.int64))
        return found


def _cut(nest: Nest, buffer: int, value: Buffer) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """The loops of a nest cut so that each runs along one dim of a value that it loads: for each loop the sizes of its
    parts, and their strides in the value. None where it does not read every element once, each where it computes."""
    indices = {statement.index for statement in nest.body if isinstance(statement, Load) and statement.buffer == buffer}
    gathers = any(isinstance(statement, Load) and statement.gather >= 0 for statement in nest.body)
    if len(indices) != 1 or gathers or not value.is_contiguous:
        return None
    (index,) = indices
    order = sorted((dim for dim, size in enumerate(nest.dims) if size > 1), key=lambda dim: index.strides[dim])
    reach = 1
    for dim in order:
        if index.strides[dim] != reach:
            return None
        reach *= nest.dims[dim]
    if index.offset or reach != value.numel:
        return None
    ends, whole = [], 1
    for size in reversed(value.shape):
        whole *= size
        ends.append(whole)
    sizes: list[tuple[int, ...]] = []
    strides: list[tuple[int, ...]] = []
    for size, stride in zip(nest.dims, index.strides, strict=True):
        parts: list[int] = []
        steps: list[int] = []
        left, step = size, stride
        if size > 1:
            for end in (each for each in ends if step < each < stride * size):
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
