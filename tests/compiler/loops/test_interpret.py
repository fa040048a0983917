"""Operands as a kernel wants them to lie."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.loops.interpret import laid_out, moved
from monarch.compiler.loops.ir import Buffer


def test_the_stride_of_a_dim_of_one_element_means_nothing() -> None:
    tensor = torch.randn(4).as_strided((1, 4), (7, 1))
    assert laid_out(tensor, Buffer(torch.float32, (1, 4), (4, 1))) is tensor


@pytest.mark.parametrize("strides", [(0, 4, 1), (12, 1, 3), (0, 0, 1)])
def test_what_lies_otherwise_is_copied(strides: tuple[int, ...]) -> None:
    """Also where elements share memory, which cannot be written twice."""
    tensor = torch.randn(4, 3).t().expand(5, 3, 4) if strides[1] else torch.randn(8)[::2].expand(5, 3, 4)
    copy = laid_out(tensor, Buffer(torch.float32, (5, 3, 4), strides))
    assert copy.stride() == strides and torch.equal(copy, tensor)


def test_what_starts_elsewhere_is_moved_as_it_lies() -> None:
    tensor = torch.randn(9)[1:].expand(3, 8)
    copy = moved(tensor, tensor.stride())
    assert copy.storage_offset() == 0 and copy.stride() == (0, 1) and torch.equal(copy, tensor)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"wants torch.float32 of \[3\], got torch.float64 of \[3\]"):
        laid_out(torch.zeros(3, dtype=torch.float64), Buffer.contiguous(torch.float32, (3,)))
