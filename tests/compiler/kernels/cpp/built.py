"""Kernels as C++, built and called: all kernels of a test in one translation unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from monarch.compiler.kernels.cpp.build import build, find_compiler
from monarch.compiler.kernels.cpp.emit import emit
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import print_kernel
from monarch.runtime.worker.device.native import Bound, bind


def build_all(kernels: Sequence[Kernel], folder: Path | None = None) -> Path:
    """The shared object of some kernels; skips the test where nothing can be built."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    return build(emit(kernels), compiler, folder)


def bound(path: Path, kernel: Kernel, over: Sequence[int] = (), threads: int = 1) -> Bound:
    return bind(path, print_kernel(kernel), over or [-1] * len(kernel.outputs), threads)


def run(path: Path, kernel: Kernel, tensors: Sequence[torch.Tensor], threads: int = 1) -> list[torch.Tensor]:
    return list(bound(path, kernel, threads=threads)(list(tensors)))
