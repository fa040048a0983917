"""The errors of ops whose results' shapes depend on values, which a distributed tensor's cannot."""

from __future__ import annotations

from typing import Any

import torch

from monarch.language.errors import OperatorError
from monarch.language.recorder.refusals import refuse
from monarch.language.rewritten import put_by_mask
from monarch.language.source import user_source

aten = torch.ops.aten

_WAYS_OUT: dict[Any, str] = {
    aten.bincount: "count up to a known number: torch.zeros(n, dtype=x.dtype).index_add(0, x, torch.ones_like(x));",
    aten.linalg_lstsq: "for a matrix of full rank: q, r = torch.linalg.qr(a), and "
    "torch.linalg.solve_triangular(r, q.mT @ b, upper=True);",
    aten._ctc_loss: "give the lengths as tuples of numbers;",
    aten._unique: "write torch.where(mask, value, x) in place of index_fill with a tensor;",
    **dict.fromkeys(
        (aten._unique2, aten.unique_consecutive, aten.unique_dim),
        "mark the first of equal entries: y = x.sort()[0], and torch.cat([torch.ones(1, dtype=torch.bool), "
        "y.diff() != 0]);",
    ),
    aten.nonzero: "count with torch.count_nonzero(x), or keep the shape: torch.where(mask, x, other), x * mask;",
    aten.masked_select: "keep the shape: torch.where(mask, x, other), x * mask; F.ctc_loss takes rows that are padded "
    "at their ends, torch.where(mask, labels, 0), with lengths that are tuples of numbers, and gives the same;",
    aten.repeat_interleave: "pass the total: x.repeat_interleave(repeats, dim, output_size=n);",
}
"""Replacements for ops whose results' shapes depend on values."""


def sized_error(func: Any) -> OperatorError:
    """The error of an op that gives a tensor of such a shape."""
    return refuse(
        OperatorError(
            f"{func.overloadpacket} gives a tensor whose shape depends on values, "
            "which a distributed tensor cannot have",
            hint=_WAYS_OUT.get(
                func.overloadpacket,
                "keep the shape: torch.where(mask, x, other), x * mask, or torch.topk with a number that is known;",
            )
            + "\nor run the step without @monarch.program: there this op waits for the values.",
            source=user_source(),
        )
    )


def masked_error(x: torch.Tensor, indices: list[Any]) -> OperatorError:
    """The error of an index by masks that only the workers know."""
    return refuse(
        OperatorError(
            "an index by a mask gives a tensor whose shape depends on values, which a distributed tensor cannot have",
            hint=f"{_without_mask(x, indices)}\nOutside of programs x[mask] waits for the mask.",
            source=user_source(),
        )
    )


def _without_mask(x: torch.Tensor, indices: list[Any]) -> str:
    """Replacements for an index by masks that only the workers know."""
    wrong, right = put_by_mask(user_source(), x.ndim - indices[0].ndim) if len(indices) == 1 else ("", "")
    if right:
        width = max(len(wrong), len(right))
        return (
            f"{wrong:<{width}}  # wrong: how many entries it has, only the workers know\n"
            f"{right:<{width}}  # right, where each entry follows from those at its place"
        )
    return (
        "y = x[mask] * 2                  # wrong: how many entries it has, only the workers know\n"
        "y = torch.where(mask, x * 2, 0)  # right: all entries, and 0 where the mask is not set\n"
        "total = (x * mask).sum()         # right, for x[mask].sum(); the mean is that / mask.sum()\n"
        "x = torch.where(mask, new, x)    # right, for x[mask] = new[mask]"
    )
