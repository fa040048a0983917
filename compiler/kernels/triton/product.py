"""A matrix product and the ops on its result, as one Triton function.

A program makes a tile of rows (y) and columns (x): it loops over what is summed (r), computes a tile of each factor
from whatever the nest says (a cast, a scale), multiplies them on the matrix units, and goes on with the sums in
registers. Programs that run at the same time make tiles that lie together, so that their operands meet in the L2 cache
(Tillet et al., "Triton", 2019). Factors are read through pointers, not through Hopper's tensor memory accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from monarch.compiler.kernels.triton.function import Function
from monarch.compiler.kernels.triton.schedule import Axis, Schedule
from monarch.compiler.kernels.triton.variants import HALVES, ProductSize, Tiles
from monarch.compiler.loops.contraction import Contraction, contraction
from monarch.compiler.loops.ir import Kernel, Load, Nest, Op, Store, traffic
from monarch.compiler.loops.nests import joined, live, operands


@dataclass(frozen=True)
class Product:
    """A nest that is a matrix product, over as few dims as it can be: those of a batch, rows, columns, and r."""

    nest: Nest
    found: Contraction

    @property
    def summed(self) -> tuple[int, ...]:
        return tuple(range(len(self.nest.kept), len(self.nest.dims)))

    def size(self, dims: Iterable[int]) -> int:
        return math.prod(self.nest.dims[dim] for dim in dims)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the batch, rows, columns and r."""
        found = self.found
        return self.size(found.batch), self.size(found.rows), self.size(found.columns), self.size(self.summed)

    def factors(self, dtypes: Sequence[torch.dtype | None]) -> tuple[int, int]:
        """The values that the matrix units multiply: in f32, or both in bf16 or f16, whose products are exact there."""
        body = self.nest.body
        narrow = []
        for value in (self.found.left, self.found.right):
            statement = body[value]
            if isinstance(statement, Op) and statement.name == "cast" and dtypes[statement.args[0]] in HALVES:
                narrow.append(statement.args[0])
        if len(narrow) == 2 and dtypes[narrow[0]] == dtypes[narrow[1]]:
            return narrow[0], narrow[1]
        return self.found.left, self.found.right


def product_of(nest: Nest) -> Product | None:
    """The nest as a matrix product; None for any other nest."""
    found = contraction(nest)
    if found is None:
        return None
    summed = [dim for dim in range(len(nest.kept), len(nest.dims)) if nest.dims[dim] > 1]
    guide = next(each.index.strides for each in nest.body if isinstance(each, Store))
    kept = [
        dim for group in (found.batch, found.rows, found.columns) for dim in sorted(group, key=lambda dim: -guide[dim])
    ]
    simple = joined(nest, [*kept, *summed], live(nest.body))
    again = contraction(simple)
    assert again is not None, "a product over fewer dims is one"
    return Product(simple, again)


def work_of(product: Product, kernel: Kernel, number: int) -> ProductSize:
    """The work of nest `number` of a kernel as a product, for the estimate."""
    dtype = kernel.dtypes[number][product.factors(kernel.dtypes[number])[0]]
    assert dtype is not None
    dear = any(isinstance(each, Op) and each.name in _DEAR for each in product.nest.body)
    batch, rows, columns, summed = product.sizes
    factors = product.factors(kernel.dtypes[number])
    computed = max(_loaded(product.nest, each, kernel) for each in factors)
    return ProductSize(batch, rows, columns, summed, dtype, sum(traffic(kernel)), 64 if dear else 128, computed)


def _loaded(nest: Nest, factor: int, kernel: Kernel) -> int:
    """The bytes that are loaded for an element of a factor; 0 where it is multiplied as it is loaded."""
    body = nest.body
    if isinstance(body[factor], Load):
        return 0
    pending, seen, found = [factor], {factor}, 0
    while pending:
        number = pending.pop()
        statement = body[number]
        if isinstance(statement, Load) and nest.varies[number] == nest.varies[factor]:
            found += kernel.buffer(statement.buffer).dtype.itemsize
        for each in operands(statement):
            if each not in seen:
                seen.add(each)
                pending.append(each)
    return found


_DEAR = frozenset(("pow", "exp", "expm1", "log", "log1p", "tanh", "erf", "sin", "cos"))
"""Ops that are functions with branches and registers of their own."""


@dataclass(frozen=True)
class Written:
    """The body of a product's function, the pointers that it takes in no order, its constants, and its programs."""

    lines: list[str]
    pointers: list[str]
    constants: dict[str, int]
    grid: int
    warps: int
    stages: int


def write_product(
    product: Product,
    dtypes: Sequence[torch.dtype | None],
    tiles: Tiles,
    names: Mapping[int, str],
    *,
    wide: bool,
    note: Callable[[int], str],
) -> Written:
    """The function of a product with some tiles. `names`, `wide` and `note` are those of `Function`."""
    nest, found = product.nest, product.found
    batch, rows, columns, length = product.sizes
    z = [Axis("z", found.batch, _sizes(nest, found.batch), 1)] if found.batch else []
    y = Axis("y", found.rows, _sizes(nest, found.rows), tiles.rows)
    x = Axis("x", found.columns, _sizes(nest, found.columns), tiles.columns)
    r = Axis("r", product.summed, _sizes(nest, product.summed), tiles.inner)
    masks = {axis.name: f"{axis.name}_in" for axis in (y, x, r) if axis.size % axis.block}
    used: dict[str, None] = {}

    def function(*axes: Axis, other: str = "") -> Function:
        schedule = Schedule((*z, *axes), True, 1, 1, tiles.warps)
        made = Function(nest, dtypes, schedule, names, wide=wide, note=note, gather_number={}, partials={}, other=other)
        made.masks = {axis.name: masks[axis.name] for axis in axes if axis.name in masks}
        return made

    left, right = product.factors(dtypes)
    inner: list[str] = []
    for value, axes, name in ((left, (y, r), "left"), (right, (r, x), "right")):
        part = function(*axes, other="0")
        inner.append(f"r = start_r + {part.lanes('r', 'RBLOCK')}")
        if "r" in masks:
            inner.append(f"r_in = r < {r.size}")
        part.compute([value])
        text = part.variable(value)
        if "r" in masks and not isinstance(nest.body[value], Load):
            text = f"tl.where(r_in, {text}, 0.0)"  # elements outside the tensors are 0 and add nothing
        inner += [*part.lines, f"{name} = {text}"]
        used |= part.used
    precision = "" if dtypes[left] in HALVES else ', input_precision="ieee"'
    inner.append(f"total = tl.dot(left, right, total{precision})")

    after = function(y, x)
    after.scopes[0].known[found.reduce] = "total"
    after.shapes[found.reduce] = (True, True)
    stores = [at for at, statement in enumerate(nest.body) if isinstance(statement, Store)]
    after.compute(statement.value for at in stores if isinstance(statement := nest.body[at], Store))
    for at in stores:
        after.store(at)
    used |= after.used

    down, across = -(-rows // tiles.rows), -(-columns // tiles.columns)
    lines = [f"program = tl.program_id(0){'.to(tl.int64)' if wide else ''}"]
    if z:
        lines += [f"z = program // {down * across}", f"program = program % {down * across}"]
    lines += [
        f"band = program // (GROUP * {across})",
        f"height = tl.minimum({down} - band * GROUP, GROUP)",
        f"within = program % (GROUP * {across})",
        f"y = (band * GROUP + within % height) * YBLOCK + {after.lanes('y', 'YBLOCK')}",
        f"x = (within // height) * XBLOCK + {after.lanes('x', 'XBLOCK')}",
        *(f"{axis.name}_in = {axis.name} < {axis.size}" for axis in (y, x) if axis.name in masks),
        "total = tl.zeros([YBLOCK, XBLOCK], tl.float32)",
        f"for start_r in range(0, {length}, RBLOCK):",
        *(f"    {line}" for line in inner),
        *after.lines,
    ]
    constants = {"YBLOCK": tiles.rows, "XBLOCK": tiles.columns, "RBLOCK": tiles.inner, "GROUP": tiles.group}
    return Written(lines, list(used), constants, batch * down * across, tiles.warps, tiles.stages)


def _sizes(nest: Nest, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(nest.dims[dim] for dim in dims)
