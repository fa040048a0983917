"""Running templates, comparing their results with float64, and compiling their launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from monarch.compiler.kernels.triton.crosscompile import Compiled
from monarch.stdlib.kernels.launch import recorded
from tests.compiler.kernels.triton.assembly import assert_no_spills
from tests.compiler.kernels.triton.interpreter import interpreting

TARGETS = ["cuda:80", "cuda:90", "cuda:100", pytest.param("gfx942", marks=pytest.mark.full)]
"""The kinds of GPU that kernels are compiled for. AMD's takes five times as long as the others."""
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative error that is allowed of a value of each type: two roundings, and float32 sums in another order."""


def launching(*reachable: Tensor) -> contextlib.AbstractContextManager[None]:
    """Kernels run on the GPU if there is one (the tests' tensors are made there), and in the interpreter if not."""
    return contextlib.nullcontext() if torch.cuda.is_available() else interpreting(*reachable)


def assert_near(actual: Tensor, exact: Tensor, *, scale: float = 1.0) -> None:
    """`actual` is `exact`, float64, rounded; errors are relative to the largest element of a row (its last dim).

    `scale` allows for more roundings, where a result is made from rounded intermediates.
    """
    assert exact.dtype == torch.float64 and actual.shape == exact.shape
    size = exact.abs().amax(-1, keepdim=True) if exact.dim() else exact.abs()
    error = (actual.double() - exact).abs() / size.clamp_min(1e-6)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= ROUNDING[actual.dtype] * scale, f"relative error {worst:.2g} for {actual.dtype}"


def compiled(
    target: str, fn: Callable[..., Any], *args: Any, spills: bool = False, **kwargs: Any
) -> Iterator[Compiled]:
    """Each launch of `fn`, compiled; `args` are best on the meta device. Registers must not spill unless `spills`."""
    _, launches = recorded(fn, *args, **kwargs)
    assert launches
    for launch in launches:
        kernel = launch.compile(target)
        if not spills:
            assert_no_spills(kernel)
        yield kernel


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
