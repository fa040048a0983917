"""StandIns, lists and NumPy arrays as arguments of programs, where the annotation names a tensor type."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from monarch.compiler.errors import ProgramError
from monarch.compiler.types import TensorType
from monarch.language.source import user_source

ARRAYS = (list, tuple, int, float, complex, np.ndarray, np.generic)
"""What a program takes for a tensor where its annotation says one."""


def as_annotated(value: Any, type: TensorType, name: str) -> torch.Tensor:
    """The tensor that `torch.as_tensor` makes of an argument. Python's numbers take the annotation's dtype where
    PyTorch would promote theirs to it; NumPy's keep their own. Raises ProgramError where PyTorch can make no tensor.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # programs change no argument
            warnings.filterwarnings("ignore", "Creating a tensor from a list of numpy.ndarrays")
            found = torch.as_tensor(value)
            if not isinstance(value, (np.ndarray, np.generic)) and torch.can_cast(found.dtype, type.dtype):
                return torch.as_tensor(value, dtype=type.dtype)
            return found
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ProgramError(
            f"argument '{name}' is annotated as {type}, and makes no such tensor: {error}",
            hint=f"it is {_shown(value)}: pass numbers of one shape, or a tensor.",
            source=user_source(),
        ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
