"""Products of groups of rows, in all dtypes and where rows do not lie at multiples of 16 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from monarch.language import distribute, program
from tests.language.partitioned import partitioned_mesh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("door", [program, lambda step: step], ids=["program", "eager"])
@pytest.mark.parametrize("layout", ["[-, @data, -]", "[-, -, @data]", "[@data, -, -]"])
def test_groups_of_rows_are_multiplied_and_differentiated(layout: str, door: Any, dtype: torch.dtype) -> None:
    x, weight, wanted = torch.randn(10, 8), torch.randn(3, 8, 12), torch.randn(9, 12)
    ends = [4, 4, 9]  # the second group has no rows, and the last row is in none
    rows, weights = (tensor.to(dtype).requires_grad_() for tensor in (x, weight))
    parts = [rows[low:high] @ weights[at] for at, (low, high) in enumerate([(0, 4), (4, 4), (4, 9)])]
    (torch.cat(parts) * wanted.to(dtype)).sum().backward()

    with partitioned_mesh(data=2) as mesh:
        ours = distribute(x.to(dtype), mesh).requires_grad_()
        theirs = distribute(weight.to(dtype), mesh, layout).requires_grad_()

        def step(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            found = F.grouped_mm(rows, weights, offs=ends)[:9]
            (found * wanted.to(dtype)).sum().backward()
            return found

        found = door(step)(ours, theirs, distribute(torch.tensor(ends, dtype=torch.int32), mesh))
        near = {"rtol": 2e-2, "atol": 2e-1} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found.full_tensor(), torch.cat(parts), **near)
        torch.testing.assert_close(ours.grad.full_tensor(), rows.grad, **near)  # type: ignore[union-attr]
        torch.testing.assert_close(theirs.grad.full_tensor(), weights.grad, **near)  # type: ignore[union-attr]
