"""Machine code loaded and launched, with a stand-in for the driver, which runs the Triton text in the interpreter.

So this says that Triton takes what a plan has saved, and that launches get the right arguments; not that a GPU would.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from monarch.compiler.errors import MonarchError
from monarch.compiler.kernels.triton.ahead import kernel_binary
from monarch.compiler.kernels.triton.build import functions
from monarch.compiler.kernels.triton.emit import emit
from monarch.compiler.loops.interpret import interpret
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan.binaries import KernelBinary
from monarch.runtime.worker.device.load import GpuKernel
from tests.compiler.kernels.cases import softmax_text
from tests.compiler.kernels.triton.standin import StandIn
from tests.compiler.kernels.triton.test_emit import GATHER, adamw, data

CPU = torch.device("cpu")


@pytest.fixture(params=["cuda:90", "gfx942"])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gpu(target: str, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    kind = GPUTarget("cuda", 90, 32) if target == "cuda:90" else GPUTarget("hip", "gfx942", 64)
    stand_in = StandIn(kind)
    monkeypatch.setattr(driver, "_active", stand_in)
    return stand_in


def loaded(gpu: StandIn, text: str | Kernel, target: str, folder: Path) -> tuple[Kernel, KernelBinary]:
    kernel = parse_kernel(text) if isinstance(text, str) else text
    folder.chmod(0o700)
    gpu.kernels |= functions(emit(kernel))
    return kernel, kernel_binary(kernel, target, "3.6.0", folder)


def test_launches_get_their_buffers_scratch_and_constants(gpu: StandIn, target: str, tmp_path: Path) -> None:
    kernel, binary = loaded(gpu, softmax_text(3, 40_000), target, tmp_path)
    run = GpuKernel(kernel, binary, CPU)
    tensors = data(kernel)
    for found, wanted in zip(run(tensors), interpret(kernel, tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    run.check()
    assert gpu.loaded == [(each.function, each.binary, each.shared_bytes) for each in binary.launches]


def test_updates_are_in_place(gpu: StandIn, target: str, tmp_path: Path) -> None:
    kernel, binary = loaded(gpu, adamw([700, 100]), target, tmp_path)
    tensors = data(kernel)
    expected = interpret(kernel, tensors)
    over = (0, 2, 3, 4, 6, 7)
    results = GpuKernel(kernel, binary, CPU, over)(tensors)
    for result, operand, wanted in zip(results, over, expected, strict=True):
        assert result is tensors[operand]
        torch.testing.assert_close(result, wanted)


def test_operands_that_lie_otherwise_are_copied(gpu: StandIn, target: str, tmp_path: Path) -> None:
    kernel, binary = loaded(gpu, softmax_text(6, 8), target, tmp_path)
    run = GpuKernel(kernel, binary, CPU)
    (tensor,) = data(kernel)
    odd = torch.empty(49)[1:].view(6, 8).copy_(tensor)
    assert odd.data_ptr() % 16
    for other in (odd, tensor.t().contiguous().t()):
        torch.testing.assert_close(run([other])[0], interpret(kernel, [tensor])[0])


def test_an_index_out_of_range_is_told_once(gpu: StandIn, target: str, tmp_path: Path) -> None:
    kernel, binary = loaded(gpu, GATHER, target, tmp_path)
    run = GpuKernel(kernel, binary, CPU)
    rows, table = torch.zeros(40, dtype=torch.int64), torch.randn(100, 24)
    run([rows, table])
    run.check()
    run([rows + 100, table])
    with pytest.raises(IndexError, match=r"train\.py:7: an index is out of range: there are 100 rows"):
        run.check()
    run.check()


def test_what_cannot_be_overwritten(gpu: StandIn, target: str, tmp_path: Path) -> None:
    kernel, binary = loaded(gpu, GATHER, target, tmp_path)
    with pytest.raises(MonarchError, match="cannot overwrite operand 1"):
        GpuKernel(kernel, binary, CPU, (1,))


def test_a_gpu_with_too_little_shared_memory(gpu: StandIn, target: str, tmp_path: Path) -> None:
    kernel, binary = loaded(gpu, softmax_text(3, 4000), target, tmp_path)
    (launch,) = binary.launches
    greedy = replace(launch, metadata={**launch.metadata, "shared": 300_000})
    with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        GpuKernel(kernel, replace(binary, launches=(greedy,)), CPU)
