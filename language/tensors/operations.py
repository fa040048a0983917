"""The operations that meshes and tensors leave to the rooms above theirs: recording, running, programs.

A tensor's `+` is the recorder's work, and the recorder makes tensors. So that imports go one way, meshes and tensors
call the functions of `operations`, which `monarch.language` fills in when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Operations:
    """The functions by which a mesh or a tensor has its work done."""

    __slots__ = (
        "activate",
        "adopt",
        "clone",
        "constrain",
        "discard",
        "dispatch",
        "flush",
        "is_tracing",
        "plainly",
        "position",
        "program",
        "put",
        "read_item",
        "read_known",
        "read_truth",
        "reduce",
        "selected",
        "slice_mesh",
        "to_dtensor",
        "to_mesh",
        "transfer",
        "zeros",
    )

    dispatch: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    """Records one ATen call: (overload, args, kwargs) -> result."""
    clone: Callable[[Any], Any]
    """Records a copy of a tensor, with a cell of its own."""
    constrain: Callable[..., Any]
    """Records a change of layout: (tensor, Layout) -> tensor."""
    read_item: Callable[[Any], Any]
    """A tensor's one element as a Python number."""
    read_known: Callable[[Any], Any]
    """A tensor's value as a plain tensor, where it is known while a program is traced, or None."""
    read_truth: Callable[[Any], bool]
    """Whether a tensor's one element is not zero."""
    selected: Callable[..., Any]
    """`tensor[index]`, where the index has tensors without dims: (tensor, index) -> tensor."""
    put: Callable[..., None]
    """`tensor[index] = value` with such an index: (tensor, index, value)."""
    zeros: Callable[..., Any]
    """Records a tensor of zeros: (mesh, shape, dtype) -> tensor."""
    is_tracing: Callable[[], bool]
    """Whether this thread traces a program."""
    flush: Callable[..., None]
    """Runs the ops pending on a mesh."""
    discard: Callable[[Any, Any], None]
    """Drops the ops pending on a mesh, whose results raise an error: (mesh, error)."""
    adopt: Callable[..., Any]
    """Makes distributed tensors of actors' results: (mesh, shards, layout)."""
    activate: Callable[..., AbstractContextManager[None]]
    """Makes a block per-worker code: (mesh, mesh dims)."""
    plainly: Callable[[], AbstractContextManager[None]]
    """Runs a block outside of the per-worker code around it."""
    position: Callable[..., Any]
    """Records each worker's position along a mesh dim: (mesh, mesh dim) -> tensor."""
    reduce: Callable[..., Any]
    """Reduces what workers have of their own: (tensor, mesh dims, reduction, scatter, mesh) -> tensor."""
    slice_mesh: Callable[..., Any]
    """A tensor as workers at some positions have it: (tensor, positions)."""
    to_dtensor: Callable[..., Any]
    """A tensor as PyTorch's DTensor: (tensor, device mesh or None)."""
    to_mesh: Callable[..., Any]
    """A tensor on a mesh: (tensor, mesh)."""
    transfer: Callable[..., Any]
    """A tensor on another part of the mesh that was made: (tensor, mesh, layout or None)."""
    program: Callable[..., Callable[..., Any]]
    """Makes a function a program of a mesh: (function, mesh)."""


operations = Operations()
