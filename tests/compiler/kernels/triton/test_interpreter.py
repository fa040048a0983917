"""The interpreter's mended defects, and that it catches faults."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch.testing import assert_close
from triton.language.extra import libdevice

from monarch.compiler.kernels.triton.crosscompile import cross_compile
from tests.compiler.kernels.triton.interpreter import interpreting
from tests.compiler.kernels.triton.memory import MemoryFault

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@triton.jit
def _double(x):
    return x + x


@triton.jit
def _arithmetic(X, Y, OUT, SUM, MAX, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(X + i), tl.load(Y + i)
    z = _double(x) * y - tl.where(x > y, x, y) * (tl.abs(y) + 1.0)
    tl.store(OUT + i, z)
    tl.store(SUM, tl.sum(x, axis=0))
    tl.store(MAX, tl.max(-x, axis=0))


@triton.jit
def _cast(X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, tl.load(X + i).to(OUT.dtype.element_ty))


@triton.jit
def _matmul(A, B, C, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * N + n[None, :])
    tl.store(C + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def _functions(X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(X + i)
    tl.store(OUT + i, libdevice.tanh(x) + libdevice.pow(x * x, 0.25) + libdevice.erf(x))


@triton.jit
def _bessel(X, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, libdevice.j1(tl.load(X + i)))


@triton.jit
def _copy(X, OUT, n, stride, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n if MASKED else i >= 0
    tl.store(OUT + i, tl.load(X + i * stride, mask=mask), mask=mask)


@triton.jit
def _collide(OUT, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(OUT, 1.0)
    else:
        tl.store(OUT, tl.load(OUT) + 1.0)


@triton.jit
def _halo(X):
    program = tl.program_id(0)
    tl.store(X + program, tl.load(X + program + 1))


def test_bf16_arithmetic_rounds_once_an_operation_as_eager_does() -> None:
    x, y = torch.randn(2, 256).bfloat16()
    out, total, largest = torch.empty_like(x), torch.empty(1).bfloat16(), torch.empty(1).bfloat16()
    with interpreting():
        _arithmetic[(1,)](x, y, out, total, largest, N=256)
    assert_close(out, (x + x) * y - torch.where(x > y, x, y) * (y.abs() + 1), rtol=0, atol=0)
    assert_close(total[0], x.float().sum().bfloat16())
    assert_close(largest[0], (-x).max(), rtol=0, atol=0)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, *FP8], ids=str)
def test_casts_round_to_nearest_even(to: torch.dtype) -> None:
    halfway = torch.tensor([1 + k * 2.0**-bits for k in (1, 3) for bits in (3, 4, 8)] + [-0.0, 2.0**-9])
    x = torch.cat([halfway, torch.randn(248)])
    out = torch.empty(256, dtype=to)
    with interpreting():
        _cast[(1,)](x, out, N=256)
    assert_close(out.float(), x.to(to).float(), rtol=0, atol=0)


@pytest.mark.parametrize("to", FP8, ids=str)
def test_casts_to_fp8_saturate(to: torch.dtype) -> None:
    x = torch.tensor([1e9, -1e9, 3.0, float("nan")])
    out = torch.empty(4, dtype=to)
    with interpreting():
        _cast[(1,)](x, out, N=4)
    largest = torch.finfo(to).max
    assert_close(out.float(), torch.tensor([largest, -largest, 3.0, float("nan")]), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *FP8], ids=str)
def test_dot(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 32).to(dtype), torch.randn(32, 16).to(dtype)
    c = torch.empty(16, 16)
    with interpreting():
        _matmul[(1,)](a, b, c, M=16, N=16, K=32)
    assert_close(c, a.float() @ b.float())


def test_libdevice() -> None:
    x = torch.randn(64)
    out = torch.empty(64)
    with interpreting():
        _functions[(1,)](x, out, N=64)
    assert_close(out, x.tanh() + (x * x).pow(0.25) + x.erf())


def test_a_libdevice_function_that_the_interpreter_lacks_is_an_error() -> None:
    with interpreting(), pytest.raises(NotImplementedError, match="libdevice.j1 is not in the table"):
        _bessel[(1,)](torch.randn(64), torch.empty(64), N=64)


def test_an_access_out_of_bounds_is_a_fault() -> None:
    x, out = torch.randn(100), torch.empty(100)
    with interpreting():
        _copy[(2,)](x, out, 100, 1, BLOCK=64, MASKED=True)
        assert_close(out, x)
        with pytest.raises(MemoryFault, match=r"_copy: program 1 \(1, 0, 0\) loads 28 elements outside"):
            _copy[(2,)](x, out, 100, 1, BLOCK=64, MASKED=False)


def test_an_access_between_the_elements_of_a_strided_tensor_is_a_fault() -> None:
    x, out = torch.randn(64, 2)[:, 0], torch.empty(64)
    with interpreting():
        _copy[(1,)](x, out, 64, 2, BLOCK=64, MASKED=True)
        assert_close(out, x)
        with pytest.raises(MemoryFault, match="byte 4 under X, where no element starts"):
            _copy[(1,)](x, out, 64, 1, BLOCK=64, MASKED=True)


def test_a_race_between_programs_is_a_fault_and_an_atomic_is_none() -> None:
    out = torch.zeros(1)
    with interpreting():
        _collide[(4,)](out, ATOMIC=True)
        assert out.item() == 4
        with pytest.raises(MemoryFault, match="loads byte 0 of OUT, which program 0 stored"):
            _collide[(2,)](out, ATOMIC=False)
        with pytest.raises(MemoryFault, match="stores byte 4 of X, which program 0 loaded"):
            _halo[(2,)](torch.zeros(3))


def test_unknown_launch_options_are_refused() -> None:
    with interpreting(), pytest.raises(AssertionError, match="takes no {'num_warp'}"):
        _collide[(1,)](torch.zeros(1), ATOMIC=True, num_warp=4)


def test_a_kernel_can_be_compiled_while_and_after_it_is_interpreted() -> None:
    x, out = torch.randn(64), torch.empty(64)
    types, constants = {"X": "*fp32", "OUT": "*fp32"}, {"N": 64}
    with interpreting():
        _functions[(1,)](x, out, N=64)
        inside = cross_compile(_functions, types, constants, "cuda:90")
    assert cross_compile(_functions, types, constants, "cuda:90").binary == inside.binary
    with pytest.raises(RuntimeError, match="scope of a kernel|driver"):
        _functions[(1,)](x, out, N=64)
