"""C++ kernels compute what the IR says, on the suite that all emitters share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.kernels.cpp import emit as emitting
from monarch.compiler.kernels.cpp.emit import emit, origin, sized, symbol
from monarch.compiler.loops.interpret import interpret
from monarch.compiler.loops.ir import Kernel, may_overwrite
from monarch.compiler.loops.text import parse_kernel, print_kernel
from tests.compiler.kernels.cases import cases, sums
from tests.compiler.kernels.checking import Case, check_results, operands
from tests.compiler.kernels.cpp.built import bound, build_all, run
from tests.compiler.kernels.strategies import kernels
from tests.sample import examples

SIZED = [replace(case, kernel=replace(case.kernel, sized=True)) for case in (*cases(), *sums())[::12]]


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    """All cases, built so that the smallest loops are worth several threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitting, "LEAST_WORK", 8)
        yield build_all([*(case.kernel for case in (*cases(), *sums())), *(case.kernel for case in SIZED)])


@pytest.mark.parametrize("case", (*cases(), *sums()), ids=str)
def test_a_kernel_computes_what_the_ir_says(path: Path, case: Case) -> None:
    tensors = case.tensors()
    if case.fails:
        with pytest.raises(IndexError, match="out of range"):
            interpret(case.kernel, tensors)
        with pytest.raises(IndexError, match="out of range"):
            run(path, case.kernel, tensors)
        return
    found = run(path, case.kernel, tensors)
    check_results(case.kernel, tensors, found, case.tolerance)
    for threads in (2, 3):
        for ours, theirs in zip(run(path, case.kernel, tensors, threads), found, strict=True):
            assert same_bits(ours, theirs), f"{threads} threads"
    if case.over:
        held = [tensor.clone() for tensor in tensors]
        results = bound(path, case.kernel, case.over)(held)
        for output, operand in enumerate(case.over):
            assert torch.equal(results[output], found[output])
            assert operand < 0 or results[output] is held[operand]


@pytest.mark.parametrize("case", SIZED, ids=str)
def test_a_kernel_that_takes_its_sizes(path: Path, case: Case) -> None:
    assert parse_kernel(print_kernel(case.kernel)) == case.kernel
    tensors = case.tensors()
    if case.fails:
        with pytest.raises(IndexError, match="out of range"):
            run(path, case.kernel, tensors)
        return
    for threads in (1, 3):
        check_results(case.kernel, tensors, run(path, case.kernel, tensors, threads), case.tolerance)


def test_kernels_of_other_sizes_are_one_function() -> None:
    text = "sized kernel norm(a0: f32[{0}, 64], a1: f32[{0}]) -> (b0: f32[{0}])\nnest [{0} | 64] {{\n"
    text += "%0 = load a0 [64, 1]\n%1 = reduce sum %0\n%2 = load a1 [1, 0]\n%3 = add f32(%1, %2)\n"
    text += "%4 = store b0 [1, 0] %3\n}}\n"
    few, many = (parse_kernel(text.format(rows)) for rows in (5, 4000))
    assert emit([few]) == emit([many]) and symbol(few) == symbol(many) and origin([few]) == origin([many])
    assert sized(few).numbers != sized(many).numbers
    assert origin([few]) != origin([replace(few, sized=False)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


@examples(2, 6)
@given(st.lists(kernels(sums=True), min_size=40, max_size=40))
def test_random_kernels(many: list[Kernel]) -> None:
    distinct = list({print_kernel(kernel): kernel for kernel in many}.values())
    path = build_all(distinct)
    for seed, kernel in enumerate(distinct):
        tensors = operands(kernel, seed=seed)
        found = run(path, kernel, tensors)
        check_results(kernel, tensors, found, tolerance=1e-4)
        for output in range(len(kernel.outputs)):
            for operand in range(len(kernel.inputs)):
                if may_overwrite(kernel, output, operand):
                    over = [operand if at == output else -1 for at in range(len(kernel.outputs))]
                    again = bound(path, kernel, over)([tensor.clone() for tensor in tensors])
                    assert all(map(same_bits, again, found))


def test_the_text_is_the_same_in_every_run_and_does_not_depend_on_the_users_lines() -> None:
    case = next(case for case in cases() if case.name == "layer norm")
    text = print_kernel(case.kernel)
    noted = parse_kernel(text.replace("%0 = load a0 [96, 1]", "%0 = load a0 [96, 1]  # train.py:7"))
    assert emit([noted]) == emit([case.kernel]) == emit([parse_kernel(text)])
    assert "// train.py:7" in emit([noted], lines=True)
    assert "// train.py:7" not in emit([noted])
