"""The content of a checkpoint, whatever its format."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch

from monarch.compiler.errors import CheckpointError
from monarch.compiler.execution.storage import Stored
from monarch.stdlib.checkpoints.nest import Path, name_of


@dataclass(frozen=True)
class Entry:
    """A tensor in files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[Stored, ...]


@dataclass(frozen=True)
class Catalog:
    """The tensors and values of a checkpoint, by name.

    `values`  what reads each one's bytes, as `torch.save` has written them
    `paths`   where each stood in what was saved
    `ties`    names that are another name's tensor, which stands there once"""

    path: FilePath
    tensors: Mapping[str, Entry]
    values: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)

    def under(self, path: Path) -> list[str]:
        """The names that begin with a path."""
        start = name_of(path) + "." if path else ""
        return [name for held in (self.tensors, self.values) for name in held if name.startswith(start)]

    def value(self, name: str) -> Any:
        """A Python value. Raises CheckpointError where it is none that PyTorch loads with `weights_only`."""
        if name not in self.values:
            raise CheckpointError(f"'{name}' is not a Python value in the checkpoint {self.path}")
        data = self.values[name]()
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # an unpickler raises whatever the bytes make it raise
            raise CheckpointError(
                f"the value '{name}' of {self.path} cannot be read: {error}",
                hint="Monarch loads only the pickled objects that torch.load(weights_only=True) loads.",
            ) from None


def value_bytes(name: str, value: Any) -> bytes:
    """A Python value as a checkpoint has it. Raises CheckpointError for one that could not be read again."""
    made = io.BytesIO()
    try:
        torch.save(value, made)
        torch.load(io.BytesIO(made.getvalue()), weights_only=True)
    except Exception as error:  # likewise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = "" if first.startswith("Weights only load failed") else f" ({first})"  # it advises to trust the file
        raise CheckpointError(
            f"'{name}' cannot be saved: its type is {type(value).__name__}, which is no plain value{why}",
            hint="save numbers, text, lists and dicts of these, tensors (torch.from_numpy makes one of an array), or "
            "objects with state_dict() and load_state_dict().",
        ) from None
    return made.getvalue()


__all__ = ["Catalog", "Entry", "value_bytes"]
