"""Kernels that every emitter has to run rightly, as data: each op, dtype, shape class, stride class and reduction.

`cases()` gives those written out here; random ones come from `strategies.py`.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from monarch.compiler.loops.ir import (
    Buffer,
    Constant,
    Index,
    Kernel,
    Load,
    Nest,
    Op,
    Reduce,
    Store,
    row_major,
)
from monarch.compiler.loops.signatures import BOOL, DTYPES, FLOATS, INTS, POINTWISE, REDUCTIONS
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.types import DTYPE_NAMES
from tests.compiler.kernels.checking import F32, HALVES, SPECIAL, Case, operands


def _flat(dtype: torch.dtype, size: int) -> Buffer:
    return Buffer.contiguous(dtype, (size,))


def _pointwise(name: str, dtype: torch.dtype) -> Case:
    signature = POINTWISE[name]
    size, along = 77, Index(0, (1,))
    dtypes = [dtype] * signature.operands
    if name == "where":
        dtypes[0] = BOOL
    given = BOOL if signature.gives_bool else dtype
    count = len(dtypes)
    body = (*(Load(i, along) for i in range(count)), Op(name, tuple(range(count)), given), Store(count, along, count))
    kernel = Kernel(
        f"{name}_{DTYPE_NAMES[dtype]}",
        tuple(_flat(d, size) for d in dtypes),
        (_flat(given, size),),
        (Nest((size,), 0, body),),
    )

    def tensors() -> list[torch.Tensor]:
        made = operands(kernel, special=True)
        if name in ("log", "sqrt", "rsqrt", "pow") and dtype.is_floating_point:
            made[0][len(SPECIAL) :].abs_()
        if name in ("shl", "shr"):
            made[1] = made[1].abs() % (torch.iinfo(dtype).bits if name == "shr" else 30)
        if dtype in INTS and name not in ("shl", "shr"):
            made[0][:3] = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min, torch.iinfo(dtype).min + 1])
        return made

    exact = given == BOOL or dtype not in FLOATS or name in ("neg abs sign add sub mul max min div where").split()
    return Case(f"{name} {DTYPE_NAMES[dtype]}", kernel, tensors, tolerance=0.0 if exact else 5e-7)


def _cast(source: torch.dtype, target: torch.dtype) -> Case:
    size, along = 70, Index(0, (1,))
    body = (Load(0, along), Op("cast", (0,), target), Store(1, along, 1))
    name = f"{DTYPE_NAMES[source]}_to_{DTYPE_NAMES[target]}"
    kernel = Kernel(name, (_flat(source, size),), (_flat(target, size),), (Nest((size,), 0, body),))

    def tensors() -> list[torch.Tensor]:
        (made,) = operands(kernel, special=target.is_floating_point or target == BOOL)
        if source.is_floating_point:
            made[40:] *= 10
        if source.is_floating_point and target in HALVES:  # subnormals, ties, and what rounds to infinity
            some = [
                65519.9,
                65520.0,
                1 + 2**-11,
                1 + 3 * 2**-11,
                1 + 2**-8,
                1 + 3 * 2**-8,
                5e-8,
                6e-8,
                9e-8,
                1e-7,
                3.39e38,
            ]
            made[20 : 20 + len(some)] = torch.tensor(some, dtype=torch.float64).to(source)
        if target == torch.uint8:
            made.abs_() if source != BOOL and source != torch.uint8 else None
        return [made]

    return Case(name.replace("_", " "), kernel, tensors, tolerance=0.0)


def _reduction(name: str, dtype: torch.dtype, kept: tuple[int, ...], reduced: tuple[int, ...], inner: bool) -> Case:
    """Over the last dims of a contiguous buffer, or over the first."""
    dims = (*kept, *reduced)
    if inner:
        buffer, strides = Buffer.contiguous(dtype, dims), row_major(dims)
    else:
        buffer = Buffer.contiguous(dtype, (*reduced, *kept))
        steps = row_major((*reduced, *kept))
        strides = (*steps[len(reduced) :], *steps[: len(reduced)])
    out = (*row_major(kept), *(0 for _ in reduced))
    body = (Load(0, Index(0, strides)), Reduce(name, 0), Store(1, Index(0, out), 1))
    sizes = f"{'x'.join(map(str, kept)) or 'one'}_{'x'.join(map(str, reduced))}"
    kernel = Kernel(
        f"{name}_{DTYPE_NAMES[dtype]}_{sizes}_{'inner' if inner else 'outer'}",
        (buffer,),
        (Buffer.contiguous(dtype, kept),),
        (Nest(dims, len(reduced), body),),
    )

    def tensors() -> list[torch.Tensor]:
        (made,) = operands(kernel)
        if dtype in FLOATS and name in ("max", "min"):
            made.view(-1)[made.numel() // 2] = math.nan
        if dtype in FLOATS and name == "prod":
            made.sign_().add_(made.new_tensor(0.001))
        return [made]

    exact = dtype not in FLOATS or name in ("max", "min")
    return Case(kernel.name.replace("_", " "), kernel, tensors, tolerance=0.0 if exact else 2e-5)


def _written(
    text: str, *, name: str = "", over: tuple[int, ...] = (), tolerance: float = 3e-6, **fixed: object
) -> Case:
    """A case from text. `fixed` gives operands by name (a1=[...]); the others are random."""
    kernel = parse_kernel(text)

    def tensors() -> list[torch.Tensor]:
        made = operands(kernel)
        for at, buffer in enumerate(kernel.inputs):
            if (given := fixed.get(f"a{at}")) is not None:
                made[at] = torch.as_tensor(given).to(buffer.dtype).expand(buffer.shape).contiguous()
        return made

    fails = bool(fixed.get("fails", False))
    return Case(name or kernel.name.replace("_", " "), kernel, tensors, over, fails, tolerance)


def _shapes() -> list[Case]:
    """y = tanh(x) * x + 1 over shapes and strides of every class."""
    cases = []
    shapes = [(), (1,), (7,), (16,), (3, 5, 7), (2, 300), (129, 1, 33), (40_001,)]
    for shape in shapes:
        steps = row_major(shape)
        ways = {"contiguous": (Buffer.contiguous(F32, shape), Index(0, steps))}
        if len(shape) > 1:
            turned = row_major(tuple(reversed(shape)))[::-1]
            padded = row_major((*shape[:-1], shape[-1] + 3))
            ways["transposed"] = (Buffer(F32, shape, turned), Index(0, turned))
            ways["padded rows"] = (Buffer(F32, shape, padded), Index(0, padded))
            ways["broadcast rows"] = (_flat(F32, shape[-1]), Index(0, (*(0 for _ in shape[1:]), 1)))
            ways["broadcast columns"] = (_flat(F32, shape[0]), Index(0, (1, *(0 for _ in shape[1:]))))
            halves = tuple(2 * step for step in steps)
            ways["every second"] = (_flat(F32, 2 * math.prod(shape)), Index(1, halves))
        if shape:
            ways["offset"] = (_flat(F32, math.prod(shape) + 5), Index(5, steps))
            ways["one element"] = (_flat(F32, 1), Index(0, tuple(0 for _ in shape)))
        for way, (buffer, index) in ways.items():
            out = Buffer.contiguous(F32, shape)
            body = (
                Load(0, index),
                Op("tanh", (0,), F32),
                Load(1, Index(0, steps)),
                Constant(1.0, F32),
                Op("mul", (1, 2), F32),
                Op("add", (4, 3), F32),
                Store(2, Index(0, steps), 5),
            )
            name = f"{way} {'x'.join(map(str, shape)) or 'no dims'}"
            kernel = Kernel(f"k_{name.replace(' ', '_')}", (buffer, out), (out,), (Nest(shape, 0, body),))
            cases.append(Case(name, kernel, lambda kernel=kernel: operands(kernel)))
    return cases


SOFTMAX = """
kernel {name}(a0: {dtype}[{rows}, {columns}]) -> (b0: {dtype}[{rows}, {columns}], b1: f32[{rows}])
nest [{rows} | {columns}] {{
  %0 = load a0 [{row}, {column}]
  %1 = cast f32(%0)
  %2 = reduce max %1
  %3 = sub f32(%1, %2)
  %4 = exp f32(%3)
  %5 = reduce sum %4
  %6 = div f32(%4, %5)
  %7 = cast {dtype}(%6)
  %8 = store b0 [{row}, {column}] %7
  %9 = log f32(%5)
  %10 = add f32(%9, %2)
  %11 = store b1 [1, 0] %10
}}
"""


def softmax_text(
    rows: int, columns: int, dtype: str = "f32", along_columns: bool = False, name: str = "softmax"
) -> str:
    """Along contiguous rows or, with `along_columns`, along the first dim of the same memory."""
    row, column = (1, rows) if along_columns else (columns, 1)
    text = SOFTMAX.format(name=name, dtype=dtype, rows=rows, columns=columns, row=row, column=column)
    if along_columns:
        text = text.replace(f"{dtype}[{rows}, {columns}]", f"{dtype}[{rows}, {columns}] strides [1, {rows}]")
    return text


def softmax(rows: int, columns: int, dtype: str = "f32", along_columns: bool = False) -> Case:
    name = f"softmax_{dtype}_{rows}x{columns}{'_columns' if along_columns else ''}"
    text = softmax_text(rows, columns, dtype, along_columns, name)
    return _written(text, over=(0, -1), tolerance=1e-2 if dtype != "f32" else 3e-6)


LAYER_NORM = """
kernel layer_norm(a0: f32[37, 96], a1: f32[96], a2: f32[96]) -> (b0: f32[37, 96], b1: f32[37], b2: f32[37])
nest [37 | 96] {
  %0 = load a0 [96, 1]
  %1 = reduce sum %0
  %2 = constant f32 96.0
  %3 = div f32(%1, %2)
  %4 = sub f32(%0, %3)
  %5 = mul f32(%4, %4)
  %6 = reduce sum %5
  %7 = div f32(%6, %2)
  %8 = constant f32 1e-05
  %9 = add f32(%7, %8)
  %10 = rsqrt f32(%9)
  %11 = mul f32(%4, %10)
  %12 = load a1 [0, 1]
  %13 = load a2 [0, 1]
  %14 = fma f32(%11, %12, %13)
  %15 = store b0 [96, 1] %14
  %16 = store b1 [1, 0] %3
  %17 = store b2 [1, 0] %10
}
"""

BATCH_NORM = """
kernel batch_norm(a0: f32[6, 20, 35]) -> (b0: f32[6, 20, 35], b1: f32[20])
nest [20 | 6, 35] {
  %0 = load a0 [35, 700, 1]
  %1 = reduce sum %0
  %2 = constant f32 210.0
  %3 = div f32(%1, %2)
  %4 = sub f32(%0, %3)
  %5 = mul f32(%4, %4)
  %6 = reduce sum %5
  %7 = rsqrt f32(%6)
  %8 = mul f32(%4, %7)
  %9 = store b0 [35, 700, 1] %8
  %10 = store b1 [1, 0, 0] %3
}
"""

COLUMN_SUMS = """
kernel column_sums(a0: f32[300, 70], a1: f32[300], a2: f32[70]) -> (b0: f32[70], b1: f32[70])
nest [70 | 300] {
  %0 = load a0 [1, 70]
  %1 = load a1 [0, 1]
  %2 = load a2 [1, 0]
  %3 = tanh f32(%2)
  %4 = mul f32(%0, %1)
  %5 = reduce sum %4
  %6 = mul f32(%0, %3)
  %7 = reduce max %6
  %8 = store b0 [1, 0] %5
  %9 = add f32(%5, %7)
  %10 = store b1 [1, 0] %9
}
"""

CROSS_ENTROPY = """
kernel cross_entropy(a0: f32[9, 130], a1: i64[9]) -> (b0: f32[9], b1: f32[9, 130])
nest [9 | 130] {
  %0 = load a0 [130, 1]
  %1 = reduce max %0
  %2 = sub f32(%0, %1)
  %3 = exp f32(%2)
  %4 = reduce sum %3
  %5 = log f32(%4)
  %6 = load a1 [1, 0]
  %7 = load a0 [130, 0] gather %6 * 1 of 130
  %8 = sub f32(%7, %1)
  %9 = sub f32(%5, %8)
  %10 = store b0 [1, 0] %9
  %11 = div f32(%3, %4)
  %12 = position 1
  %13 = eq bool(%12, %6)
  %14 = cast f32(%13)
  %15 = sub f32(%11, %14)
  %16 = store b1 [130, 1] %15
}
"""

EMBEDDING = """
kernel embedding(a0: f32[50, 24], a1: i64[4, 6]) -> (b0: f32[4, 6, 24])
nest [4, 6, 24] {
  %0 = load a1 [6, 1, 0]
  %1 = load a0 [0, 0, 1] gather %0 * 24 of 50
  %2 = store b0 [144, 24, 1] %1
}
"""

PICKED_SUMS = """
kernel picked_sums(a0: f32[40], a1: i64[5, 33]) -> (b0: f32[5])
nest [5 | 33] {
  %0 = load a1 [33, 1]
  %1 = load a0 [0, 0] gather %0 * 2 of 20
  %2 = reduce sum %1
  %3 = store b0 [1, 0] %2
}
"""

RANDOM = """
kernel random_numbers(a0: i64[]) -> (b0: i64[5, 77], b1: f64[5, 77])
nest [5, 77] {
  %0 = load a0 [0, 0]
  %1 = position 0
  %2 = constant i64 77
  %3 = mul i64(%1, %2)
  %4 = position 1
  %5 = add i64(%3, %4)
  %6 = constant i64 -7046029254386353131
  %7 = mul i64(%5, %6)
  %8 = add i64(%7, %0)
  %9 = constant i64 30
  %10 = shr i64(%8, %9)
  %11 = constant i64 17179869183
  %12 = and i64(%10, %11)
  %13 = xor i64(%8, %12)
  %14 = constant i64 -4658895280553007687
  %15 = mul i64(%13, %14)
  %16 = store b0 [77, 1] %15
  %17 = constant i64 40
  %18 = shr i64(%15, %17)
  %19 = constant i64 16777215
  %20 = and i64(%18, %19)
  %21 = cast f64(%20)
  %22 = constant f64 5.960464477539063e-08
  %23 = mul f64(%21, %22)
  %24 = store b1 [77, 1] %23
}
"""

UPDATES = """
kernel updates(a0: f32[30, 7], a1: f32[30, 7], a2: f32[501], a3: f32[501], a4: f32[]) -> (b0: f32[30, 7], b1: f32[501])
nest [30, 7] {
  %0 = load a0 [7, 1]
  %1 = load a1 [7, 1]
  %2 = load a4 [0, 0]
  %3 = mul f32(%1, %2)
  %4 = sub f32(%0, %3)
  %5 = store b0 [7, 1] %4
}
nest [501] {
  %0 = load a2 [1]
  %1 = load a3 [1]
  %2 = load a4 [0]
  %3 = mul f32(%1, %2)
  %4 = sub f32(%0, %3)
  %5 = store b1 [1] %4
}
"""

# A store of the first phase over an operand that later ones load again.
STORED_EARLY = """
kernel stored_early(a0: f32[5, 200]) -> (b0: f32[5, 200], b1: f32[5])
nest [5 | 200] {
  %0 = load a0 [200, 1]
  %1 = constant f32 2.0
  %2 = mul f32(%0, %1)
  %3 = store b0 [200, 1] %2
  %4 = reduce sum %0
  %5 = mul f32(%0, %4)
  %6 = reduce sum %5
  %7 = store b1 [1, 0] %6
}
"""

# Reductions of what does not vary along the reduced dims, or along some of them only.
CONSTANT_SUMS = """
kernel constant_sums(a0: f32[6], a1: f32[5]) -> (b0: f32[6], b1: f32[6])
nest [6 | 5, 9] {
  %0 = load a0 [1, 0, 0]
  %1 = reduce sum %0
  %2 = store b0 [1, 0, 0] %1
  %3 = load a1 [0, 1, 0]
  %4 = mul f32(%0, %3)
  %5 = reduce sum %4
  %6 = store b1 [1, 0, 0] %5
}
"""

ONES = """
kernel sizes_of_one(a0: f32[1, 6, 1]) -> (b0: f32[6], b1: f32[1, 6])
nest [1, 6 | 1] {
  %0 = load a0 [6, 1, 1]
  %1 = reduce sum %0
  %2 = reduce max %1
  %3 = position 0
  %4 = cast f32(%3)
  %5 = add f32(%2, %4)
  %6 = store b0 [0, 1, 0] %5
  %7 = store b1 [6, 1, 0] %0
}
"""

STORED_CONSTANTS = """
kernel stored_constants() -> (b0: f32[3, 4], b1: bool[5], b2: i64[4, 2])
nest [3, 4] {
  %0 = constant f32 0.1
  %1 = store b0 [4, 1] %0
}
nest [5] {
  %0 = constant bool true
  %1 = store b1 [1] %0
}
nest [4, 2] {
  %0 = position 0
  %1 = store b2 [2, 1] %0
}
"""

# One nest with outputs of several shapes: each is stored at the loops along which it varies.
SEVERAL_SHAPES = """
kernel several_shapes(a0: f32[6], a1: f32[40]) -> (b0: f32[6], b1: f32[40], b2: f32[6, 40], b3: f32[40, 6])
nest [6, 40] {
  %0 = load a0 [1, 0]
  %1 = exp f32(%0)
  %2 = store b0 [1, 0] %1
  %3 = load a1 [0, 1]
  %4 = neg f32(%3)
  %5 = store b1 [0, 1] %4
  %6 = mul f32(%1, %4)
  %7 = store b2 [40, 1] %6
  %8 = store b3 [1, 6] %6
}
"""


# Rows that are reduced, and columns that are added up: before, between and behind the reductions.
NORM_GRADIENTS = """
kernel norm_gradients(a0: f32[96, 40], a1: f32[96, 40], a2: f32[40]) -> (b0: f32[96, 40], b1: f32[40], b2: f32[40])
nest [96 | 40] {
  %0 = load a0 [40, 1]
  %1 = load a1 [40, 1]
  %2 = load a2 [0, 1]
  %3 = mul f32(%0, %2)
  %4 = mul f32(%3, %1)
  %5 = reduce sum %4
  %6 = constant f32 40.0
  %7 = div f32(%5, %6)
  %8 = mul f32(%1, %7)
  %9 = sub f32(%3, %8)
  %10 = store b0 [40, 1] %9
  %11 = mul f32(%0, %1)
  %12 = accumulate sum b1 [0, 1] %11
  %13 = accumulate sum b2 [0, 1] %9
}
"""
# Over several dims, of which one asks for its position; whole numbers, and a value that does not vary.
SUMS_OF_MANY = """
kernel sums_of_many(a0: i64[3, 64, 5, 7], a1: f32[64]) -> (b0: i64[5, 7], b1: i64[3, 7, 5], b2: f32[7, 5], b3: f32[64])
nest [3, 64, 5, 7] {
  %0 = load a0 [2240, 35, 7, 1]
  %1 = position 0
  %2 = mul i64(%0, %1)
  %3 = accumulate sum b0 [0, 0, 7, 1] %2
  %4 = accumulate sum b1 [35, 0, 1, 5] %0
  %5 = load a1 [0, 1, 0, 0]
  %6 = accumulate sum b2 [0, 0, 1, 5] %5
  %7 = accumulate sum b3 [0, 1, 0, 0] %5
}
"""
# All along the only dim: elements that all positions of the innermost loop add to.
TOTAL = """
kernel total(a0: f32[40, 33], a1: f32[40]) -> (b0: f32[], b1: f32[40], b2: f32[40, 33], b3: f32[])
nest [40, 33] {
  %0 = load a0 [33, 1]
  %1 = accumulate sum b0 [0, 0] %0
  %2 = accumulate sum b1 [1, 0] %0
  %3 = accumulate sum b2 [33, 1] %0
}
nest [40] {
  %0 = load a1 [1]
  %1 = accumulate sum b3 [0] %0
}
"""
PICKED_ROWS = """
kernel picked_rows(a0: f32[9, 70], a1: i64[257]) -> (b0: f32[257], b1: f32[70])
nest [257 | 70] {
  %0 = load a1 [1, 0]
  %1 = load a0 [0, 1] gather %0 * 70 of 9
  %2 = reduce sum %1
  %3 = store b0 [1, 0] %2
  %4 = sub f32(%1, %2)
  %5 = accumulate sum b1 [0, 1] %4
}
"""


@cache
def sums() -> tuple[Case, ...]:
    """Of stores that add up, which emitters for GPUs do not know."""
    rows = torch.arange(257) % 9
    return (
        _written(NORM_GRADIENTS, tolerance=1e-5),
        _written(NORM_GRADIENTS, over=(0, -1, -1), tolerance=1e-5, name="norm gradients in place"),
        _written(NORM_GRADIENTS, over=(1, -1, -1), tolerance=1e-5, name="norm gradients over the other"),
        _written(SUMS_OF_MANY, tolerance=1e-5),
        _written(TOTAL, tolerance=1e-5),
        _written(PICKED_ROWS, a1=rows, tolerance=1e-5),
        _written(PICKED_ROWS, a1=rows + 1, fails=True, name="picked rows beyond the end"),
    )


@cache
def cases() -> tuple[Case, ...]:
    found: list[Case] = []
    for name, signature in POINTWISE.items():
        if name != "cast":
            found += [_pointwise(name, dtype) for dtype in signature.dtypes]
    found += [_cast(source, target) for source in DTYPES for target in DTYPES]
    for name, dtypes in REDUCTIONS.items():
        for dtype in dtypes:
            found += [_reduction(name, dtype, (5,), (33,), inner) for inner in (True, False)]
    for kept, reduced in [
        ((), (40,)),
        ((), (9001,)),
        ((1,), (5, 7)),
        ((70,), (200,)),
        ((3, 5), (4, 6)),
        ((2,), (5000,)),
    ]:
        for name in ("sum", "max"):
            found += [_reduction(name, F32, kept, reduced, inner) for inner in (True, False)]
    found += _shapes()
    found += [softmax(8, 100), softmax(5, 1000), softmax(3, 40_000), softmax(7, 64, "bf16"), softmax(7, 65, "f16")]
    found += [softmax(70, 200, along_columns=True), softmax(600, 5, "bf16", along_columns=True)]
    written = (LAYER_NORM, BATCH_NORM, COLUMN_SUMS, ONES, CONSTANT_SUMS, STORED_CONSTANTS, SEVERAL_SHAPES)
    found += [_written(text) for text in written]
    found.append(_written(RANDOM, tolerance=0.0))
    found.append(_written(UPDATES, over=(0, 2), tolerance=0.0))
    found.append(_written(STORED_EARLY, over=(0, -1), tolerance=1e-4))
    labels = torch.arange(9) * 14
    found.append(_written(CROSS_ENTROPY, a1=labels))
    found.append(_written(CROSS_ENTROPY, a1=labels + 20, fails=True, name="cross entropy of no class"))
    rows = torch.arange(24).reshape(4, 6) * 2
    found.append(_written(EMBEDDING, a1=rows))
    found.append(_written(EMBEDDING, a1=rows - 1, fails=True, name="embedding of row -1"))
    found.append(_written(PICKED_SUMS, a1=torch.arange(33) % 20))
    found.append(_written(PICKED_SUMS, a1=torch.arange(33) % 21, fails=True, name="picked sums beyond the end"))
    return tuple(found)
