"""Emitted kernels compiled for each target: wide loads and stores, nothing in local memory; and their texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monarch.compiler.kernels.ir import Kernel
from monarch.compiler.kernels.text import parse_kernel
from monarch.compiler.kernels.triton.build import compile_launches
from monarch.compiler.kernels.triton.emit import emit
from tests.kernels.triton.assembly import assert_no_spills, assert_wide
from tests.kernels.triton.test_emit import GATHER, LAYOUTS, REDUCED, SOFTMAX, adamw

TARGETS = ["cuda:80", "cuda:90", "cuda:100", "gfx942"]

COLUMN_SUM = REDUCED.format(
    dtype="f32", name="sum", a=4096, b=1, c=1024, shape="1, 1024", kept="1, 1024", reduced="4096", strides="0, 1, 1024",
    out="0, 1, 0",
)  # fmt: skip
KERNELS = {
    "short_rows": SOFTMAX.format(rows=4096, columns=128, dtype="f32"),
    "whole_rows": SOFTMAX.format(rows=4096, columns=4096, dtype="bf16"),
    "looped_rows": SOFTMAX.format(rows=4096, columns=50_304, dtype="f32"),
    "split_rows": SOFTMAX.format(rows=4, columns=65_536, dtype="f32"),
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


@pytest.mark.parametrize("target", TARGETS)
def test_memory_is_read_and_written_16_bytes_at_a_time(kernel: Kernel, target: str) -> None:
    source = emit(kernel)
    for at, compiled in enumerate(compile_launches(kernel, source, target)):
        assert compiled.binary[:4] == b"\x7fELF"
        assert compiled.name == source.launches[at].function
        assert_no_spills(compiled)
        bits = 64 if kernel.name == "embed" and target.startswith("gfx") else 128
        assert_wide(compiled, bits, WIDE.get(kernel.name, BOTH)[at])


def test_more_elements_than_32_bits_count() -> None:
    kernel = parse_kernel(
        f"kernel k(a0: i8[{2**33}]) -> (b0: i8[{2**33}])\nnest [{2**33}] {{\n%0 = load a0 [1]\n%1 = store b0 [1] %0}}"
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
