"""A stand-in for the driver of a GPU, which runs kernels' Triton text in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from monarch.compiler.kernels.triton.build import functions
from monarch.compiler.kernels.triton.emit import emit, variants_of
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.plan.binaries import KernelBinary
from monarch.runtime.worker.device import gpu, load, tune
from tests.compiler.kernels.triton.emitted import fast_reductions
from tests.compiler.kernels.triton.interpreter import interpreting


class StandIn:
    """A driver of one GPU that knows kernels by their entry points, and runs them in the interpreter."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.kernels: dict[str, triton.JITFunction] = {}
        self.loaded: list[tuple[str, bytes, int]] = []
        self.launcher_cls = self.launcher
        self.utils = self
        self.carry_out: Callable[[Callable[[Sequence[Any]], None], Sequence[Any]], None] = carry_out
        """What is done with a launch, and its arguments."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 200_000}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded.append((name, binary, shared))
        return "module", self.kernels[name], 32, 0, 1024

    def launcher(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, kernel: Any, *more: Any) -> None:
            assert stream == 7
            arguments = more[4:]  # behind metadata and hooks
            assert [*source.signature] == kernel.arg_names and len(arguments) == len(kernel.arg_names)
            for (name, kind), value in zip(source.signature.items(), arguments, strict=True):
                if kind == "constexpr":
                    assert source.constants[name] == value
                else:
                    assert kind == triton.runtime.jit.mangle_type(value)
            self.carry_out(partial(interpret, kernel, (x, y, z)), arguments)

        return launch


def interpret(kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
    with interpreting(), fast_reductions():
        kernel[grid](*arguments)


def carry_out(launch: Callable[[Sequence[Any]], None], arguments: Sequence[Any]) -> None:
    launch(arguments)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Put one in the driver's place, for the target cuda:90, that knows each generated kernel once it is loaded."""
    made = StandIn(GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(driver, "_active", made)

    class Known(load.GpuKernel):
        def __init__(self, kernel: Kernel, binary: KernelBinary, *more: Any) -> None:
            tiles = {str(tiles or ""): tiles for tiles, _ in variants_of(kernel, "cuda:90")}
            made.kernels |= functions(emit(kernel, tiles=tiles[binary.variant]))
            super().__init__(kernel, binary, *more)

    for module in (load, gpu, tune):
        monkeypatch.setattr(module, "GpuKernel", Known)
    return made
