"""Machine code for GPUs, made without one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import triton
import triton.language as tl

from monarch.compiler.errors import MonarchError
from monarch.compiler.kernels.triton.crosscompile import cross_compile
from tests.compiler.kernels.triton.assembly import (
    access_bits,
    assert_no_spills,
    assert_tensor_cores,
    assert_wide,
    spilled_bytes,
)

TARGETS = ["cuda:80", "cuda:90", "cuda:100", "gfx942"]


@triton.jit
def _scale(X, Y, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def _square(A, C, N: tl.constexpr, REPEAT: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a = tl.load(A + at)
    tl.store(C + at, tl.dot(a, a))


TYPES = {"X": "*bf16", "Y": "*bf16", "n": "i32", "factor": "fp32"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_for_each_target(target: str) -> None:
    kernel = cross_compile(_scale, TYPES, {"BLOCK": 2048}, target, aligned=["X", "Y", "n"])
    assert (kernel.name, kernel.target, kernel.num_warps, kernel.shared_bytes) == ("_scale", target, 4, 0)
    assert kernel.binary[:4] == b"\x7fELF"
    assert "tt.load" in kernel.layouts
    assert_wide(kernel)
    assert_no_spills(kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_a_dot_runs_on_tensor_cores(target: str) -> None:
    kernel = cross_compile(_square, {"A": "*bf16", "C": "*fp32"}, {"N": 64, "REPEAT": 1}, target, aligned=["A", "C"])
    assert_tensor_cores(kernel)
    assert_wide(kernel)
    assert kernel.shared_bytes > 0 or target == "gfx942"


def test_without_alignment_nothing_is_vectorised() -> None:
    kernel = cross_compile(_scale, TYPES, {"BLOCK": 1024}, "cuda:90")
    assert set(access_bits(kernel, "load")) == {16}
    with pytest.raises(AssertionError, match="loads of \\[16\\] bits only"):
        assert_wide(kernel)


def test_spills_are_seen() -> None:
    kernel = cross_compile(
        _square, {"A": "*fp32", "C": "*fp32"}, {"N": 64, "REPEAT": 1}, "cuda:80", num_warps=1, maxnreg=32
    )
    assert spilled_bytes(kernel) > 0
    with pytest.raises(AssertionError, match="spills"):
        assert_no_spills(kernel)


def test_metadata_is_plain_and_names_no_machine() -> None:
    kernel = cross_compile(_scale, TYPES, {"BLOCK": 1024}, "cuda:90", num_warps=8)
    assert json.loads(json.dumps(kernel.metadata)) == kernel.metadata
    assert kernel.metadata["target"] == {"backend": "cuda", "arch": 90, "warp_size": 32}
    assert kernel.num_warps == 8
    assert "/" not in json.dumps(kernel.metadata)
    assert __file__.encode() not in kernel.binary and __file__ not in kernel.assembly


def test_line_info_names_the_kernels_source() -> None:
    kernel = cross_compile(_scale, TYPES, {"BLOCK": 1024}, "cuda:90", line_info=True)
    assert ".loc" in kernel.assembly and "test_crosscompile.py" in kernel.assembly


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": "cuda:91"}, "unknown target 'cuda:91'"),
        ({"target": "cpu"}, "no kernels for the target 'cpu'"),
        ({"num_warp": 4}, "no option 'num_warp'\n  did you mean 'num_warps'"),
        ({"aligned": ["Z"]}, "the kernel _scale has no parameter 'Z'"),
        ({"signature": {"X": "*bf16", "Y": "*bf16", "factor": "fp32"}}, "no type or constant for 'n'"),
        ({"signature": {**TYPES, "m": "i32"}}, "no parameter 'm'"),
        ({"constexprs": {"BLOCK": 1024, "n": 5}}, "'n' both as a type and as a constant"),
        ({"constexprs": {}, "signature": {**TYPES, "BLOCK": "i32"}}, "'BLOCK' is a tl.constexpr"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_errors(changed: dict, message: str) -> None:
    given = {"signature": TYPES, "constexprs": {"BLOCK": 1024}, "target": "cuda:90", **changed}
    with pytest.raises(MonarchError) as caught:
        cross_compile(_scale, given.pop("signature"), given.pop("constexprs"), given.pop("target"), **given)
    assert message in str(caught.value)


def test_importing_the_package_does_not_import_triton() -> None:
    code = (
        "import sys, monarch, monarch.stdlib, monarch.compiler.kernels.triton.crosscompile\n"
        "assert 'triton' not in sys.modules"
    )
    paths = ":".join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": paths})
