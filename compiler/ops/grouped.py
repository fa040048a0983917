"""Products of groups of rows, as mixtures of experts have them (`torch.nn.functional.grouped_mm`), as one op of ours.

PyTorch's own has shape functions that take bfloat16 alone, and refuses rows that do not begin at multiples of 16 bytes:
those of a block, or of a transposed operand, often do not."""

from __future__ import annotations

import functools
from typing import Any

import torch

FORMS = {(2, 3): "s k, e k n, e -> s n", (3, 2): "e m k, k s, e -> m s", (2, 2): "m s, s n, e -> e m n"}
"""By the operands' dims: `e` groups, one behind the other along `s`, end where the last operand says."""


def result_shape(a: torch.Tensor, b: torch.Tensor, groups: int) -> tuple[int, ...]:
    """The shape of the product. Raises RuntimeError where the operands do not fit."""
    experts = {each.shape[0] for each in (a, b) if each.ndim == 3} | {groups}
    if (a.ndim, b.ndim) not in FORMS or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype or len(experts) > 1:
        raise RuntimeError(
            f"grouped_mm of {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype} in {groups} groups: the inner "
            "sizes, the dtypes and the number of groups have to be the same"
        )
    return (*((groups,) if a.ndim == b.ndim else ()), a.shape[-2], b.shape[-1])


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(result_shape(a, b, len(ends)), dtype=a.dtype, device=a.device)
    start = 0
    for at, end in enumerate(ends.tolist()):
        if a.ndim == 2 and b.ndim == 3:
            torch.mm(a[start:end], b[at], out=out[start:end])
        elif a.ndim == 3:
            out[:, start:end] = a[at] @ b[:, start:end]
        else:
            torch.mm(a[:, start:end], b[start:end], out=out[at])
        start = max(start, end)
    return out


def _shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return a.new_empty(result_shape(a, b, len(ends)))


@functools.cache
def grouped_mm() -> Any:
    """The op: it is registered when it is first needed."""
    types = "(Tensor a, Tensor b, Tensor ends) -> Tensor"
    op = torch.library.custom_op("monarch::grouped_mm", _grouped_mm, mutates_args=(), schema=types)
    op.register_fake(_shape)
    return torch.ops.monarch.grouped_mm.default


__all__ = ["FORMS", "grouped_mm", "result_shape"]
