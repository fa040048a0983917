"""Matrix products with epilogues as Triton: in the interpreter, for every tile, and as machine code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.kernels.triton.build import compile_launches
from monarch.compiler.kernels.triton.crosscompile import Compiled
from monarch.compiler.kernels.triton.emit import Emitter, emit, variants_of
from monarch.compiler.kernels.triton.product import product_of as as_product
from monarch.compiler.kernels.triton.product import work_of
from monarch.compiler.kernels.triton.variants import Tiles, library_seconds, template_seconds
from monarch.compiler.loops.ir import Kernel
from tests.compiler.kernels.graphs import graph_of
from tests.compiler.kernels.test_products import BEFORE, CASES, joined, operands_before, product_of, tensors_of
from tests.compiler.kernels.triton.assembly import assert_no_spills, assert_tensor_cores, assert_wide
from tests.compiler.kernels.triton.emitted import check

GPUS = [target for target in MACHINES if target != "cpu"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def kernel_of(name: str, dtype: torch.dtype) -> Kernel:
    function, shapes = CASES[name]
    return product_of(joined(graph_of(function, *tensors_of(shapes, dtype))))


def operands_of(kernel: Kernel) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.empty_strided(b.shape, b.strides, dtype=b.dtype).copy_(torch.randn(b.shape, generator=generator) / 4)
        for b in kernel.inputs
    ]


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name: str, dtype: str) -> None:
    kernel = kernel_of(name, DTYPES[dtype])
    check(kernel, operands_of(kernel), atol=2e-5 if dtype == "f32" else 1e-2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BEFORE)
def test_what_makes_a_factor_in_the_interpreter(name: str) -> None:
    tensors = operands_before(name)
    kernel = product_of(joined(graph_of(BEFORE[name][0], *tensors)))
    given = [
        torch.empty_strided(b.shape, b.strides, dtype=b.dtype).copy_(torch.randint(-9, 9, b.shape))
        if b.dtype == torch.int8
        else values
        for b, values in zip(kernel.inputs, operands_of(kernel), strict=True)
    ]
    check(kernel, given, atol=5e-2 if name != "both factors" else 2e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("tiles", [Tiles(16, 64, 16, 2, 2), Tiles(64, 16, 32, 4, 3), Tiles(32, 32, 64, 4, 1, group=1)])
@pytest.mark.parametrize("name", ["sizes of no tile", "a batch of transposes", "heads", "transposed"])
def test_any_tiles_give_the_same(name: str, tiles: Tiles) -> None:
    kernel = kernel_of(name, torch.float32)
    check(kernel, operands_of(kernel), atol=2e-5, tiles=tiles)


@pytest.mark.parametrize("name", ["sizes of no tile", "a batch of transposes", "heads"])
def test_addresses_of_64_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, "reaches_far", lambda self, nest: True)
    kernel = kernel_of(name, torch.float32)
    assert "tl.program_id(0).to(tl.int64)" in emit(kernel).text
    check(kernel, operands_of(kernel), atol=2e-5)


def test_far_addresses_are_noticed() -> None:
    """The last tile of a matrix of 2^31 elements reaches past what 32 bits hold."""
    shapes = ((65536, 32), (32, 32768))
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    kernel = product_of(joined(graph_of(CASES["gelu"][0], *tensors)))
    assert "tl.program_id(0).to(tl.int64)" in emit(kernel).text
    assert "int64" not in emit(kernel_of("gelu", torch.bfloat16)).text


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_epilogues(data: st.DataObject) -> None:
    """Any chain of pointwise ops, with operands along rows, columns or both, and values that are kept on the way."""
    rows, inner, columns = (data.draw(st.sampled_from([16, 24, 40])) for _ in range(3))
    shapes = [(rows, inner), (inner, columns)]
    steps = data.draw(
        st.lists(st.sampled_from(["row", "column", "whole", "tanh", "relu", "keep", "scale"]), min_size=1, max_size=6)
    )
    for step in steps:
        shapes += {"row": [(rows, 1)], "column": [(columns,)], "whole": [(rows, columns)]}.get(step, [])

    def function(x: torch.Tensor, w: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, kept, value = list(others), [], x @ w
        for step in steps:
            if step in ("row", "column", "whole"):
                value = value * 0.5 + left.pop(0)
            elif step == "keep":
                kept.append(value * 2)
            else:
                value = {"tanh": torch.tanh, "relu": torch.relu, "scale": lambda x: x * 0.25}[step](value)
        return value + 1, *kept

    dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    kernel = product_of(joined(graph_of(function, *tensors_of(tuple(shapes), dtype))))
    check(kernel, operands_of(kernel), atol=2e-5 if dtype == torch.float32 else 2e-2)


# Machine code --------------------------------------------------------------------------------------------------------


def compiled(kernel: Kernel, target: str, tiles: Tiles | None = None) -> Compiled:
    (made,) = compile_launches(kernel, emit(kernel, tiles=tiles), target)
    return made


def large(name: str, dtype: torch.dtype) -> Kernel:
    """The kernel of a case with sizes for which there are enough large tiles."""
    function, shapes = CASES[name]
    bigger = {48: 4096, 32: 1024, 80: 4096}
    found = [[bigger.get(size, size) for size in shape] for shape in shapes]
    return product_of(joined(graph_of(function, *(torch.empty(shape, dtype=dtype, device="meta") for shape in found))))


@pytest.mark.sample(4)
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", ["gelu", "residual", "the slope"])
def test_compiled_for_matrix_units(name: str, target: str) -> None:
    kernel = large(name, torch.bfloat16)
    (tiles, _), *_ = variants_of(kernel, target)
    made = compiled(kernel, target, tiles)
    assert_tensor_cores(made)
    assert_no_spills(made)
    assert_wide(made, kinds=("load",))
    assert made.shared_bytes <= MACHINES[target].shared


@pytest.mark.parametrize("target", GPUS)
def test_a_cast_weight_is_multiplied_on_matrix_units(target: str) -> None:
    shapes = ((torch.bfloat16, (2048, 1024)), (torch.float32, (1024, 2048)))
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shapes]
    kernel = product_of(joined(graph_of(BEFORE["a cast weight"][0], *tensors)))
    (tiles, _), *_ = variants_of(kernel, target)
    made = compiled(kernel, target, tiles)
    assert_tensor_cores(made)
    assert_no_spills(made)
    assert made.shared_bytes <= MACHINES[target].shared


@pytest.mark.parametrize("target", GPUS)
def test_float32_is_multiplied_as_such(target: str) -> None:
    kernel = large("gelu", torch.float32)
    (tiles, _), *_ = variants_of(kernel, target)
    made = compiled(kernel, target, tiles)
    assert "tf32" not in made.assembly
    assert_no_spills(made)
    assert_wide(made)


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", GPUS)
def test_every_variant_fits_its_gpu(target: str) -> None:
    kernel = large("residual", torch.bfloat16)
    variants = variants_of(kernel, target)
    assert len(variants) > 2
    assert [seconds for _, seconds in variants] == sorted(seconds for _, seconds in variants)
    for tiles, _ in variants:
        made = compiled(kernel, target, tiles)
        assert made.shared_bytes <= MACHINES[target].shared
        assert_no_spills(made)


@pytest.mark.parametrize("target", GPUS)
def test_the_estimates_are_of_one_kind(target: str) -> None:
    """A library is no slower than the template with the same bytes."""
    kernel = large("gelu", torch.bfloat16)
    found = as_product(kernel.nests[0])
    assert found is not None
    work = work_of(found, kernel, 0)
    best = min(template_seconds(work, tiles, target) for tiles, _ in variants_of(kernel, target) if tiles)
    assert library_seconds(work, target) <= best
