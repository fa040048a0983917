"""`torch.utils.swap_tensors` of tensors that programs read. PyTorch refuses tensors that have weak references, as those
of programs' guards are; these hold on: a tensor that is swapped stays the object that it is, and is read at each call.
"""

from __future__ import annotations

import weakref
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.utils

from monarch.language.programs.guards import Guards


def _of_others(tensor: torch.Tensor) -> list[Any]:
    """The weak references to a tensor that are not those of guards."""
    found = weakref.getweakrefs(tensor)
    return [ref for ref in found if getattr(ref.__callback__, "__func__", None) is not Guards._die]


_names = {**vars(torch.utils), "weakref": SimpleNamespace(getweakrefs=_of_others)}
torch.utils.swap_tensors = FunctionType(torch.utils.swap_tensors.__code__, _names)
