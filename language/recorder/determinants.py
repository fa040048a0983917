"""Determinants, by factors that do not depend on the matrix's strides on a worker.

PyTorch factors the matrix or its transpose, whichever has the better strides, and the gradients ask the matrix again
which of them it was. They ask the tensor that is traced, and a worker may hold the matrix in another order: so the
factors here are those of what the traced one says.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.ops.record import enter
from monarch.language.recorder.dispatch import record
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten


def _det(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_computed(func, args[0]):
        return record(func, args, kwargs)
    factors, pivots, diagonal, sign = _factors(args[0])
    return diagonal.prod(-1) * sign, factors, pivots


def _slogdet(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_computed(func, args[0]):
        return record(func, args, kwargs)
    factors, pivots, diagonal, sign = _factors(args[0])
    return diagonal.sgn().prod(-1) * sign, diagonal.abs().log().sum(-1), factors, pivots


def _is_computed(func: Any, x: Any) -> bool:
    """Not where it is written to a given tensor, and not where PyTorch raises an error."""
    square = isinstance(x, DistributedTensor) and x.ndim > 1 and x.shape[-1] == x.shape[-2]
    return square and (x.is_floating_point() or x.is_complex()) and not func._schema.is_mutable


def _factors(x: DistributedTensor) -> tuple[torch.Tensor, ...]:
    """Factors, pivots, the diagonal, and the sign of the order that the rows were brought into."""
    turned = x.is_contiguous() and not x.is_complex()
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(x.mT if turned else x)
    unmoved = record(aten.arange.start, (1, x.shape[-1] + 1), {"dtype": pivots.dtype}, x.mesh)
    return factors, pivots, factors.diagonal(dim1=-2, dim2=-1), 1 - 2 * ((pivots != unmoved).sum(-1) % 2)


enter((aten._linalg_det,), record=_det)
enter((aten._linalg_slogdet,), record=_slogdet)
