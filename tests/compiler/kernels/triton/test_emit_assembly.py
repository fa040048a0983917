"""Emitted kernels compiled for each target: wide loads and stores, nothing in local memory; and their texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from monarch.compiler.kernels.triton.build import compile_launches
from monarch.compiler.kernels.triton.emit import emit
from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.ir import Buffer, Index, Kernel, Load, Nest, Op, Reduce, Statement, Store
from monarch.compiler.loops.signatures import ARITHMETIC, BOOL, DTYPES, POINTWISE, REDUCTIONS
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.types import DTYPE_NAMES
from tests.compiler.kernels.cases import softmax_text
from tests.compiler.kernels.triton.assembly import assert_no_spills, assert_wide
from tests.compiler.kernels.triton.test_emit import GATHER, LAYOUTS, REDUCED, adamw

TARGETS = ["cuda:80", "cuda:90", "cuda:100", "gfx942"]

COLUMN_SUM = REDUCED.format(
    dtype="f32", name="sum", a=4096, b=1, c=1024, shape="1, 1024", kept="1, 1024", reduced="4096", strides="0, 1, 1024",
    out="0, 1, 0",
)  # fmt: skip
KERNELS = {
    "short_rows": softmax_text(4096, 128),
    "whole_rows": softmax_text(4096, 4096, "bf16"),
    "looped_rows": softmax_text(4096, 50_304),
    "split_rows": softmax_text(4, 65_536),
    "columns": COLUMN_SUM,
    "transposed": LAYOUTS.format(a=512, b=256),
    "gather": GATHER,
}
LOADS, BOTH = ("load",), [("load", "store")]
WIDE = {"split_rows": [LOADS, LOADS, *BOTH], "reduced": [LOADS, ()]}
"""What is wide in each launch, where that is not all: partial results are single elements."""


@pytest.fixture(params=[*KERNELS, "updates"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "updates":
        return adamw([1 << 20] * 20 + [1000 + 4 * at for at in range(16)])
    return parse_kernel(KERNELS[request.param].replace("kernel softmax", f"kernel {request.param}"))


@pytest.mark.sample(8)
@pytest.mark.parametrize("target", TARGETS)
def test_memory_is_read_and_written_16_bytes_at_a_time(kernel: Kernel, target: str) -> None:
    source = emit(kernel)
    for at, compiled in enumerate(compile_launches(kernel, source, target)):
        assert compiled.binary[:4] == b"\x7fELF"
        assert compiled.name == source.launches[at].function
        assert_no_spills(compiled)
        bits = 64 if kernel.name == "embed" and target.startswith("gfx") else 128
        assert_wide(compiled, bits, WIDE.get(kernel.name, BOTH)[at])


def every_op(dtype: torch.dtype) -> Kernel:
    """Each op and reduction that takes a dtype, and casts to and from it."""
    size = 256
    body: list[Statement] = [Load(0, Index(0, (1,))), Load(1, Index(0, (1,))), Load(2, Index(0, (1,)))]
    made: list[tuple[int, torch.dtype]] = []

    def add(statement: Statement, of: torch.dtype) -> None:
        body.append(statement)
        made.append((len(body) - 1, of))

    for name, op in POINTWISE.items():
        if name == "cast" or dtype not in op.dtypes:
            continue
        args = (2, 0, 1) if name == "where" else tuple(range(op.operands)) if op.operands < 3 else (0, 1, 0)
        of = BOOL if op.gives_bool else dtype
        add(Op(name, args, of), of)
    for other in DTYPES:
        add(Op("cast", (0,), other), other)
        add(Op("cast", (len(body) - 1,), dtype), dtype)
    outputs = tuple(Buffer.contiguous(of, (size,)) for _, of in made)
    stores = tuple(Store(3 + at, Index(0, (1,)), value) for at, (value, _) in enumerate(made))
    pointwise = Nest((size,), 0, (*body, *stores))
    names = [name for name, dtypes in REDUCTIONS.items() if dtype in dtypes]
    reduced = tuple(Reduce(name, 0) for name in names)
    first = 3 + len(outputs)
    results = tuple(Store(first + at, Index(0, (0,)), 1 + at) for at in range(len(names)))
    reductions = Nest((size,), 1, (body[0], *reduced, *results))
    inputs = (Buffer.contiguous(dtype, (size,)),) * 2 + (Buffer.contiguous(BOOL, (size,)),)
    scalars = (Buffer.contiguous(dtype, ()),) * len(names)
    kernel = Kernel("every_op", inputs, (*outputs, *scalars), (pointwise, reductions))
    check_kernel(kernel)
    return kernel


@pytest.mark.sample(4)
@pytest.mark.parametrize("target", ["cuda:90", "gfx942"])
@pytest.mark.parametrize("dtype", ARITHMETIC, ids=DTYPE_NAMES.get)
def test_every_op_of_every_dtype_compiles(dtype: torch.dtype, target: str) -> None:
    kernel = every_op(dtype)
    for compiled in compile_launches(kernel, emit(kernel), target):
        assert compiled.binary[:4] == b"\x7fELF"


def test_quotients_and_roots_are_rounded_to_nearest_and_nan_goes_through() -> None:
    kernel = every_op(torch.float32)
    text = "".join(compiled.assembly for compiled in compile_launches(kernel, emit(kernel), "cuda:90"))
    assert "div.rn.f32" in text and "sqrt.rn.f32" in text and "max.NaN.f32" in text
    assert not re.search(r"\b(div\.(full|approx)|sqrt\.approx|sin\.approx|max\.f32)", text)


def test_more_elements_than_32_bits_count() -> None:
    kernel = parse_kernel(
        f"kernel k(a0: i8[{2**33}]) -> (b0: i8[{2**33}])\nnest [{2**33}] {{\n%0 = load a0 [1]\n%1 = store b0 [1] %0\n}}"
    )
    (compiled,) = compile_launches(kernel, emit(kernel), "cuda:90")
    assert re.search(r"\b(mul|mad|shl)\S*\.(wide\.\w+|b64|s64)", compiled.assembly)
    assert_wide(compiled, 64)


def test_products_and_sums_are_rounded_one_by_one() -> None:
    text = """
        kernel k(a0: f32[4096], a1: f32[4096]) -> (b0: f32[4096])
        nest [4096] {{
          %0 = load a0 [1]
          %1 = load a1 [1]
          {}
        }}
    """
    apart = "%2 = mul f32(%0, %1)\n%3 = add f32(%2, %0)\n%4 = store b0 [1] %3"
    together = "%2 = fma f32(%0, %1, %0)\n%3 = store b0 [1] %2"
    for body, fused in ((apart, False), (together, True)):
        kernel = parse_kernel(text.format(body))
        (compiled,) = compile_launches(kernel, emit(kernel), "cuda:90")
        assert bool(re.search(r"\bfma\.rn\.f32", compiled.assembly)) == fused


@pytest.mark.parametrize("name", ["whole_rows", "split_rows", "updates"])
def test_emitted_text(name: str, request: pytest.FixtureRequest) -> None:
    kernel = adamw([1024, 600, 256]) if name == "updates" else parse_kernel(KERNELS[name])
    path = Path(__file__).parent / "expected" / f"{name}.txt"
    source = emit(kernel)
    launches = "".join(f"# {launch}\n" for launch in source.launches)
    text = f"{source.text}\n\n{launches}"
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "pytest --rewrite writes what is emitted now"
