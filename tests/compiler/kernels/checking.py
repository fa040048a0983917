"""A case is a kernel, its operands and how near its results have to come: `check_results` compares them with what
`interpret` gives for the same kernel, and for it in float64; a result is right if it is close to either."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from monarch.compiler.loops.interpret import interpret
from monarch.compiler.loops.ir import (
    Buffer,
    Constant,
    Kernel,
    Op,
    Statement,
)
from monarch.compiler.loops.signatures import BOOL

F32, I64 = torch.float32, torch.int64
HALVES = (torch.float16, torch.bfloat16)
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -1.5,
    2.5,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-40,
    1e30,
    -1e30,
    88.9,
    -104.0,
)


@dataclass(frozen=True)
class Case:
    """`tensors()` gives the operands. `over` is as in `ops.kernel`; `fails` says that a gather is out of range.
    `tolerance` is relative to the largest result, and 0 asks for the same bits (but for which NaN it is)."""

    name: str
    kernel: Kernel
    tensors: Callable[[], list[torch.Tensor]]
    over: tuple[int, ...] = ()
    fails: bool = False
    tolerance: float = 2e-6

    def __str__(self) -> str:
        return self.name


def values(buffer: Buffer, generator: torch.Generator, *, special: bool = False) -> torch.Tensor:
    """A tensor for a buffer; with `special`, the values that floats have trouble with come first."""
    shape, dtype = buffer.shape, buffer.dtype
    if dtype.is_floating_point:
        data = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
        if special:
            flat = data.reshape(-1)
            some = torch.tensor(SPECIAL, dtype=torch.float64)[: flat.numel()]
            flat[: len(some)] = some[torch.randperm(len(some), generator=generator)]
            data = flat.reshape(shape)
    else:
        low, high = (0, 2) if dtype == BOOL else (0, 50) if dtype == torch.uint8 else (-25, 26)
        data = torch.randint(low, high, shape, generator=generator)
    return torch.empty_strided(shape, buffer.strides, dtype=dtype).copy_(data)


def operands(kernel: Kernel, *, special: bool = False, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [values(buffer, generator, special=special) for buffer in kernel.inputs]


def in_float64(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> tuple[Kernel, list[torch.Tensor]]:
    """The kernel with all arithmetic of float32 in float64, and operands for it."""

    def wide(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == F32 else dtype

    def widened(statement: Statement) -> Statement:
        match statement:
            case Constant(value, dtype) if dtype == F32:
                return Constant(torch.tensor(value, dtype=F32).item(), torch.float64)
            case Op(_, _, dtype):
                return replace(statement, dtype=wide(dtype))
            case _:
                return statement

    return Kernel(
        kernel.name,
        tuple(replace(buffer, dtype=wide(buffer.dtype)) for buffer in kernel.inputs),
        tuple(replace(buffer, dtype=wide(buffer.dtype)) for buffer in kernel.outputs),
        tuple(replace(nest, body=tuple(map(widened, nest.body))) for nest in kernel.nests),
    ), [tensor.to(wide(tensor.dtype)) for tensor in tensors]


def check_results(
    kernel: Kernel, tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor], tolerance: float = 2e-6
) -> None:
    """Raise AssertionError unless the outputs that an emitter's code found are right."""
    expected = interpret(kernel, tensors)
    exact = interpret(*in_float64(kernel, tensors)) if tolerance else expected
    for number, (ours, theirs, best) in enumerate(zip(found, expected, exact, strict=True)):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        right = close(ours, theirs, tolerance) | close(ours, best, tolerance)
        if not bool(right.all()):
            at = tuple((~right).nonzero()[0].tolist())
            raise AssertionError(
                f"output {number} at {list(at)}: {ours[at].item()!r}, by torch {theirs[at].item()!r}, in float64 "
                f"{best[at].item()!r}; {int((~right).sum())} of {right.numel()} are wrong\n{kernel}"
            )


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    if not found.dtype.is_floating_point:
        return found == expected
    step = torch.finfo(found.dtype).eps if found.dtype in HALVES else 0.0
    rounded = expected.to(found.dtype)
    same = (found == rounded) | (found.isnan() & rounded.isnan())
    if not tolerance:
        return same
    a, b = found.double(), expected.double()
    finite = b[b.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    # A rounding of the half-precision result may fall to either side.
    return same | ((a - b).abs() <= (tolerance + step) * b.abs() + tolerance * min(largest, 1e3))
