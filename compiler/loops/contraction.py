"""A nest that is a matrix product: which of its values are multiplied, and which of its dims are rows and columns.

nest [64, 128 | 32] {
  %0 = load a0 [32, 0, 1]        # rows and what is summed
  %1 = load a1 [0, 1, 128]       # columns and what is summed
  %2 = mul f32(%0, %1)
  %3 = reduce sum %2
  ...                            # whatever is computed from the product, one element at a time
  %9 = store b0 [128, 1, 0] %8
}
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monarch.compiler.loops.ir import Load, Nest, Op, Reduce, Store
from monarch.compiler.loops.nests import live, operands


@dataclass(frozen=True)
class Contraction:
    """`reduce` is the sum of `left * right`. The nest's kept dims are those along which both vary (`batch`), the left
    one alone (`rows`), and the right one alone (`columns`); the results lie along `columns` where they are contiguous.
    """

    reduce: int
    product: int
    left: int
    right: int
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def contraction(nest: Nest) -> Contraction | None:
    """The factors of a nest's product; None for a nest that is no matrix product, or more than one.

    Every product is in f32, and every result one element for each row and column. A sum of products may then be taken
    with each product unrounded, as matrix units do.
    """
    alive = live(nest.body, gathers=True)
    sums = [at for at in alive if isinstance(nest.body[at], Reduce)]
    if len(sums) != 1 or not nest.reduced:
        return None
    (reduce,) = sums
    total = nest.body[reduce]
    assert isinstance(total, Reduce)
    product = nest.body[total.arg]
    if total.name != "sum" or not isinstance(product, Op) or product.name != "mul" or product.dtype != torch.float32:
        return None
    left, right = product.args
    real = {dim for dim, size in enumerate(nest.dims) if size > 1}
    kept = {dim for dim in real if dim < len(nest.kept)}
    summed = real - kept
    of_left, of_right = nest.varies[left], nest.varies[right]
    if not (summed and summed <= of_left and summed <= of_right) or (of_left | of_right) != real:
        return None
    for at in alive:
        statement = nest.body[at]
        if isinstance(statement, Store) and nest.varies[at] != kept:
            return None
        if isinstance(statement, Load) and statement.gather >= 0:
            return None
        if at != reduce and total.arg in operands(statement):
            return None
    rows, columns = (kept & of_left) - of_right, (kept & of_right) - of_left
    if not rows or not columns:
        return None
    stores = [s.index.strides for at in sorted(alive) if isinstance(s := nest.body[at], Store)]
    if min(stores[0][dim] for dim in rows) < min(stores[0][dim] for dim in columns):
        left, right, rows, columns = right, left, columns, rows
    batch = kept & of_left & of_right
    return Contraction(reduce, total.arg, left, right, *(tuple(sorted(dims)) for dims in (batch, rows, columns)))
