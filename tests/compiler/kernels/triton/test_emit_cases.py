"""Triton kernels compute what the IR says, on the suite that all emitters share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from monarch.compiler.kernels.triton.emit import emit
from monarch.compiler.loops.interpret import interpret
from monarch.compiler.loops.ir import Kernel, KernelError, may_overwrite
from tests.compiler.kernels.cases import cases, sums
from tests.compiler.kernels.checking import Case, check_results, operands
from tests.compiler.kernels.strategies import kernels
from tests.compiler.kernels.triton.emitted import launch_all


@pytest.mark.sample(80)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_kernel_computes_what_the_ir_says(case: Case) -> None:
    tensors = case.tensors()
    found, error = launch_all(case.kernel, tensors)
    if case.fails:
        with pytest.raises(IndexError, match="out of range"):
            interpret(case.kernel, tensors)
        assert "out of range" in emit(case.kernel).gathers[error - 1]
        return
    assert error == 0
    check_results(case.kernel, tensors, found, case.tolerance)
    if case.over:
        again, _ = launch_all(case.kernel, tensors, case.over)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize("case", sums(), ids=str)
def test_a_kernel_that_adds_up_columns_is_for_cpus(case: Case) -> None:
    with pytest.raises(KernelError, match="kernels for GPUs take two") as caught:
        emit(case.kernel)
    assert caught.value.hint == "show the program's kernels for a GPU: --target cuda:90"


@given(kernels())
def test_random_kernels(kernel: Kernel) -> None:
    tensors = operands(kernel)
    found, error = launch_all(kernel, tensors)
    assert error == 0
    check_results(kernel, tensors, found, tolerance=1e-4)
    for output in range(len(kernel.outputs)):
        for operand in range(len(kernel.inputs)):
            if may_overwrite(kernel, output, operand):
                over = [operand if at == output else -1 for at in range(len(kernel.outputs))]
                again, _ = launch_all(kernel, tensors, over)
                assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
