"""`x.data = y`: a distributed tensor's may be set to another one. A plain tensor's may not, for it would look for the
memory of `y` in this process, and end that when it is read."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.errors import MonarchError
from monarch.language.source import user_source
from monarch.language.tensors.instead import instead
from monarch.language.tensors.tensor import DistributedTensor

_DATA: Any = torch._C.TensorBase.data


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Set the data of a plain tensor. Raises MonarchError for a distributed one's."""
    if isinstance(new, DistributedTensor):
        raise MonarchError(
            f"cannot set the data of a plain tensor to {new._ref.type} on {new.mesh.spec}",
            hint=instead(
                "x.data = y.full_tensor()                            # right: fetches it\n"
                "model = monarch.module_to_mesh(model, mesh)         # right: then the parameter is on the mesh, and\n"
                "model.weight.data = y                               # takes it"
            ),
            source=user_source(),
        )
    _DATA.__set__(tensor, new)


torch.Tensor.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment]
