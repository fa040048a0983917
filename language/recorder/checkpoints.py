"""Activation checkpointing by PyTorch: which checkpoint runs the current code, and the dims along which its draws
varied.

A checkpoint computes its values again in the backward pass, outside of the per-worker code in which it computed them
first. So draws that it makes again vary along the mesh dims along which they varied then, which is kept with the
checkpoint: what the process draws and seeds in between changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from monarch.compiler.errors import ProgramError
from monarch.language.source import user_source

_drawn: WeakKeyDictionary[Any, dict[Any, tuple[str, ...]]] = WeakKeyDictionary()
"""The mesh dims along which the draws of each checkpoint varied, by what tells draws of one from each other."""


def drawn_along(key: Any, dims: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh dims along which a draw varies that would vary along `dims` where it stands: in a checkpoint that
    computes its values again, those along which it did first. `key` is the same for both. Raises ProgramError where a
    checkpoint makes two draws of one key that vary along different dims."""
    computing = []
    for part, checkpoint in checkpoints():
        if part != "checkpoint":
            dims = _drawn.get(checkpoint, {}).get(key, dims)
            break
        computing.append(checkpoint)
    for checkpoint in computing:
        if _drawn.setdefault(checkpoint, {}).setdefault(key, dims) != dims:
            raise ProgramError(
                "a checkpoint seeds PyTorch's generator twice alike, and draws each worker's own numbers along other "
                "mesh dims then",
                hint="when it recomputes its values it could not tell these draws apart: give it two seeds.",
                source=user_source(),
            )
    return dims


def checkpoints() -> Iterator[tuple[str, Any]]:
    """The checkpoints that run the current code, innermost first: the phase of each, and an object that is the same in
    its forward and backward passes. They do "checkpoint" while values are computed first, "unpack_hook" while values
    are computed again that the backward pass has asked for, and "backward" while a reentrant one computes them
    again."""
    frame: FrameType | None = sys._getframe(1)
    within: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            part, names = frame.f_code.co_name, frame.f_locals
            if part == "checkpoint" and "gen" in names:
                yield part, names["gen"].gi_frame.f_locals["new_frame"]
            elif part == "forward" and "run_function" in names:
                yield "checkpoint", names["ctx"]
            elif part == "unpack_hook" and "frame" in names:
                yield part, names["frame"]
            elif part == "backward" and not _differentiates(within):
                yield part, names["ctx"]
        within, frame = frame, frame.f_back


def checkpoint_part() -> str:
    """The phase of the innermost checkpoint that runs the current code, "" where there is none."""
    return next((part for part, _ in checkpoints()), "")


def _differentiates(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.endswith("torch/autograd/__init__.py")
