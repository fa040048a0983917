"""Exponentials of what is never positive: a cheaper function, and the same bits."""

from __future__ import annotations

import math

import torch

from monarch.compiler.kernels.cpp.emit import emit
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import parse_kernel
from tests.compiler.kernels.cpp.built import build_all, run

ROWS, COLUMNS = 7, 301

HEAD = f"(a0: f32[{ROWS}, {COLUMNS}]) -> (b0: f32[{ROWS}]"
GIVEN = f"(a0: f32[{ROWS}, {COLUMNS}], a1: f32[{ROWS}]) -> (b0: f32[{ROWS}]"
ALL = f", b1: f32[{ROWS}, {COLUMNS}])"
LOOPS = f"nest [{ROWS} | {COLUMNS}] {{\n  %0 = load a0 [{COLUMNS}, 1]"
OWN = "  %1 = reduce max %0"
LOADED = "  %1 = load a1 [1, 0]"
REST = """  %2 = sub f32(%0, %1)
  %3 = exp f32(%2)
  %4 = reduce sum %3
  %5 = store b0 [1, 0] %4"""
STORE = f"  %6 = store b1 [{COLUMNS}, 1] %3"


def kernel(name: str, head: str, *lines: str) -> Kernel:
    return parse_kernel("\n".join([f"kernel {name}{head}", LOOPS, *lines, "}"]))


SUMMED = kernel("summed", f"{HEAD})", OWN, REST)
STORED = kernel("stored", HEAD + ALL, OWN, REST, STORE)
PLAIN_SUM = kernel("plain_sum", f"{GIVEN})", LOADED, REST)
PLAIN = kernel("plain", GIVEN + ALL, LOADED, REST, STORE)


def rows() -> torch.Tensor:
    """Ordinary ones, and with results that are subnormal or 0, with infinities, with NaN, of one value."""
    x = torch.randn(ROWS, COLUMNS) * torch.tensor([1.0, 40, 1, 1, 1, 1, 0])[:, None]
    x[2] = torch.linspace(-30, 88, COLUMNS)
    x[3, ::3] = -math.inf
    x[4, 7] = math.inf
    x[5, 9] = math.nan
    return x


def test_they_have_the_bits_of_those_of_the_whole_range() -> None:
    path = build_all([SUMMED, STORED, PLAIN_SUM, PLAIN])
    x = rows()
    greatest = x.amax(1)
    (plain_sum,) = run(path, PLAIN_SUM, [x, greatest])
    stored_sum, plain = run(path, PLAIN, [x, greatest])
    assert same_bits(run(path, SUMMED, [x]), [plain_sum])
    assert same_bits(run(path, STORED, [x]), [stored_sum, plain])
    subnormal = (plain[2] > 0) & (plain[2] < torch.finfo(torch.float32).tiny)
    assert subnormal.any() and (plain[2] == 0).any()  # where cutting them off would show
    expected = (x.double() - greatest.double()[:, None]).exp().sum(1)
    torch.testing.assert_close(plain_sum.double(), expected, rtol=1e-5, atol=0, equal_nan=True)


def test_others_have_the_whole_range() -> None:
    """A value less another's maximum may be positive."""
    assert "exp_normal(v2)" in emit([SUMMED]) and "exp_below(v2)" in emit([STORED])
    assert "exp_(v2)" in emit([PLAIN_SUM]) and "exp_(v2)" in emit([PLAIN])
    negated = kernel("negated", f"{HEAD})", "  %1 = neg f32(%0)", "  %2 = reduce max %1", "  %3 = sub f32(%0, %2)",
                     "  %4 = exp f32(%3)", "  %5 = reduce sum %4", "  %6 = store b0 [1, 0] %5")  # fmt: skip
    assert "exp_(v3)" in emit([negated])


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
        for a, b in zip(ours, theirs, strict=True)
    )
