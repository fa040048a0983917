"""Long reductions of few elements, which C++ kernels take in two steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch.compiler.kernels.cpp import split as splitting
from monarch.compiler.kernels.cpp.split import split
from monarch.compiler.loops import nests
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import parse_kernel, print_kernel
from tests.compiler.kernels.cases import cases, sums
from tests.compiler.kernels.checking import check_results, operands
from tests.compiler.kernels.cpp.built import bound, build_all, run
from tests.compiler.kernels.cpp.test_emit import same_bits
from tests.compiler.kernels.strategies import kernels

WHOLE = """
kernel whole(a0: f32[64, 48], a1: f32[]) -> (b0: f32[], b1: f32[], b2: f32[])
nest [ | 64, 48] {
  %0 = load a0 [48, 1]
  %1 = reduce sum %0
  %2 = mul f32(%0, %0)
  %3 = reduce max %2
  %4 = load a1 [0, 0]
  %5 = mul f32(%1, %4)
  %6 = add f32(%5, %3)
  %7 = store b0 [0, 0] %6
  %8 = store b1 [0, 0] %1
  %9 = store b2 [0, 0] %3
}
"""
ROWS = """
kernel rows(a0: f32[3, 96, 32], a1: f32[3]) -> (b0: f32[3])
nest [3 | 96, 32] {
  %0 = load a0 [3072, 32, 1]
  %1 = position 2
  %2 = constant i64 7
  %3 = lt bool(%1, %2)
  %4 = constant f32 1.0
  %5 = where f32(%3, %4, %0)
  %6 = reduce prod %5
  %7 = load a1 [1, 0, 0]
  %8 = sub f32(%7, %6)
  %9 = store b0 [1, 0, 0] %8
}
"""
GATHERED = """
kernel gathered(a0: f32[5], a1: i64[4096], a2: i64[4096]) -> (b0: f32[4096], b1: f32[])
nest [4096] {
  %0 = load a1 [1]
  %1 = load a0 [0] gather %0 * 1 of 5
  %2 = store b0 [1] %1
}
nest [ | 4096] {
  %0 = constant f32 2.0
  %1 = load a2 [1]
  %2 = load a0 [0] gather %1 * 1 of 5  # train.py:12
  %3 = mul f32(%2, %0)
  %4 = reduce sum %3
  %5 = store b1 [0] %4
}
"""
NORM = """
kernel norm(a0: f32[4096]) -> (b0: f32[4096])
nest [ | 4096] {
  %0 = load a0 [1]
  %1 = reduce sum %0
  %2 = sub f32(%0, %1)
  %3 = store b0 [1] %2
}
"""
TWICE = """
kernel twice(a0: f32[4096]) -> (b0: f32[])
nest [ | 4096] {
  %0 = load a0 [1]
  %1 = reduce max %0
  %2 = sub f32(%0, %1)
  %3 = reduce sum %2
  %4 = store b0 [0] %3
}
"""
POSITION = "kernel at(a0: f32[4096]) -> (b0: i64[])\nnest [ | 4096] {\n%0 = position 0\n%1 = reduce sum %0\n"
POSITION += "%2 = store b0 [0] %1\n}\n"
PRIME = "kernel odd(a0: f32[4099]) -> (b0: f32[])\nnest [ | 4099] {\n%0 = load a0 [1]\n%1 = reduce sum %0\n"
PRIME += "%2 = store b0 [0] %1\n}\n"
MANY = "kernel many(a0: f32[16, 4096]) -> (b0: f32[16])\nnest [16 | 4096] {\n%0 = load a0 [4096, 1]\n"
MANY += "%1 = reduce sum %0\n%2 = store b0 [1, 0] %1\n}\n"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "LEAST_WORK", 1024)
    monkeypatch.setattr("monarch.compiler.kernels.cpp.emit.LEAST_WORK", 8)


def tensors(kernel: Kernel) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(5, each.shape, generator=generator)
        if each.dtype == torch.int64
        else torch.rand(each.shape, generator=generator) * 0.01 + 0.995
        for each in kernel.inputs
    ]


@pytest.mark.parametrize(
    ("text", "pieces"), [(WHOLE, 16), (ROWS, 16), (GATHERED, 16)], ids=["whole", "rows", "gathered"]
)
def test_a_reduction_in_pieces(text: str, pieces: int) -> None:
    kernel = parse_kernel(text)
    parted = split(kernel)
    first, second = parted.kernel.nests[-2:]
    assert parted.origin[-2:] == (len(kernel.nests) - 1, None)
    assert first.dims[0] == second.dims[-1] == 16 and second.reduced == 1
    given_ = tensors(kernel)
    path = build_all([kernel])
    found = run(path, kernel, given_)
    check_results(kernel, given_, found, 1e-4)
    for threads in (2, 3, 16):
        for ours, theirs in zip(run(path, kernel, given_, threads), found, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("text", [NORM, TWICE, POSITION, PRIME, MANY], ids=["norm", "twice", "at", "odd", "many"])
def test_a_reduction_that_stays_one(text: str) -> None:
    """It has results for each element, or a reduction of a reduction's result, asks where it is, has no equal pieces,
    or there is enough to share out."""
    kernel = parse_kernel(text)
    assert split(kernel).kernel is kernel


def test_a_long_enough_one_is_split_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert split(parse_kernel(WHOLE)).scratch == 0
    assert split(parse_kernel(WHOLE.replace("64, 48", "64, 131072").replace("[48, 1]", "[131072, 1]"))).scratch == 2


SUMMED = """
kernel summed(a0: f32[{0}, 48]) -> (b0: f32[{0}], b1: f32[48], b2: f32[48])
nest [{0} | 48] {{
  %0 = load a0 [48, 1]
  %1 = reduce max %0
  %2 = store b0 [1, 0] %1
  %3 = accumulate sum b1 [0, 1] %0
  %4 = sub f32(%0, %1)
  %5 = accumulate sum b2 [0, 1] %4
}}
"""


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [(31, 1), (32, 2), (64, 2), (96, 3), (512, 16), (1000, 20), (4096, 32), (1 << 16, 256), (4099, 1)],
)
def test_sums_over_rows_are_taken_in_pieces(rows: int, pieces: int) -> None:
    """Of 16 to 128 rows, or more where there would be too many: one after the other each would lose more bits."""
    parted = split(parse_kernel(SUMMED.format(rows)))
    assert parted.scratch == (2 if pieces > 1 else 0)
    assert parted.kernel.nests[0].dims[:-1] == ((pieces, rows // pieces) if pieces > 1 else (rows,))
    assert parted.origin == ((0, None, None) if pieces > 1 else (0,))


@pytest.mark.parametrize("rows", [31, 1000, 4096])
def test_sums_over_rows_have_the_same_bits_for_all_threads(rows: int) -> None:
    kernel = parse_kernel(SUMMED.format(rows))
    given_ = operands(kernel)
    path = build_all([kernel])
    found = run(path, kernel, given_)
    check_results(kernel, given_, found, 1e-5)
    for threads in (2, 3, 16):
        for ours, theirs in zip(run(path, kernel, given_, threads), found, strict=True):
            assert same_bits(ours, theirs)


def test_two_threads_of_a_process_at_once() -> None:
    """Workers of two meshes may run beside the same actor, and have the same object loaded."""
    kernel = parse_kernel(WHOLE.replace("64, 48", "64, 16384").replace("[48, 1]", "[16384, 1]"))
    path = build_all([kernel])
    given_ = [[torch.full((64, 16384), value), torch.ones(())] for value in (1.0, 2.0)]
    right_ = [run(path, kernel, each) for each in given_]
    start = threading.Barrier(2)

    def many(number: int) -> bool:
        call = bound(path, kernel)
        start.wait(60)
        return all(
            torch.equal(ours, wanted)
            for _ in range(100)
            for ours, wanted in zip(call(given_[number]), right_[number], strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(many, range(2)))


def test_a_lookup_that_fails_in_a_piece_is_known() -> None:
    kernel = parse_kernel(GATHERED)
    path = build_all([kernel])
    for number, line in ((1, ""), (2, r" \(train.py:12\)")):
        given_ = tensors(kernel)
        given_[number][4000] = 5
        with pytest.raises(IndexError, match=rf"there are 5 rows{line}$"):
            run(path, kernel, given_, threads=2)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reduction that can be is split."""
    monkeypatch.setattr(splitting, "LEAST_WORK", 1)
    monkeypatch.setattr(splitting, "FEW", 1 << 30)
    monkeypatch.setattr(splitting, "PIECES", range(2, 65))
    monkeypatch.setattr(nests, "LEAST_ROWS", 1)


def right(path: Path, kernel: Kernel, tensors: list[torch.Tensor], tolerance: float) -> None:
    found = run(path, kernel, tensors)
    check_results(kernel, tensors, found, tolerance)
    for ours, theirs in zip(run(path, kernel, tensors, threads=2), found, strict=True):
        assert same_bits(ours, theirs)


def test_the_suite_of_all_emitters_in_pieces(always: None) -> None:
    chosen = [case for case in (*cases(), *sums()) if not case.fails and split(case.kernel).scratch > 0]
    assert len(chosen) > 20
    path = build_all([case.kernel for case in chosen])
    for case in chosen:
        right(path, case.kernel, case.tensors(), max(case.tolerance, 1e-5 if case.tolerance else 0))


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(many=st.lists(kernels(sums=True), min_size=40, max_size=40))
def test_random_kernels_in_pieces(always: None, many: list[Kernel]) -> None:
    distinct = list({print_kernel(kernel): kernel for kernel in many}.values())
    path = build_all(distinct)
    for seed, kernel in enumerate(distinct):
        right(path, kernel, operands(kernel, seed=seed), 1e-4)
