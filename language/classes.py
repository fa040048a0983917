"""`F.one_hot` of distributed tensors: by a scatter, as on plain ones.

For tensors that are not plain, PyTorch compares with the classes instead, and gives a row of zeros for one that is not
among them. A scatter refuses it.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.ops.record import enter
from monarch.language.tensor import DistributedTensor

aten = torch.ops.aten


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if not isinstance(tensor, DistributedTensor) or num_classes < 1:
        return aten.one_hot.default.decompose(tensor, num_classes)
    zeros = torch.zeros_like(tensor.unsqueeze(-1).expand(*tensor.shape, num_classes))
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _one_hot(*args, **kwargs)


enter((aten.one_hot,), record=_handle)  # reached under inference mode only

_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("one_hot", _one_hot, "AutogradCPU")
