"""`torch.compile` where there are meshes: of a program it is the program, and what it has compiled is the original in
programs and on tensors of meshes. TorchDynamo would trace what records their ops, and Monarch compiles programs itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from monarch.language.programs.environment import find_environment
from monarch.language.programs.held import is_program
from monarch.language.recorder.recording import current
from monarch.language.tensors.mesh import open_meshes
from monarch.language.tensors.tensor import DistributedTensor


def _leaves_meshes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if is_program(cast("Any", type(model))):
            return model
        compiled = function(model, **options)
        if isinstance(model, torch.nn.Module):
            compiled.forward = _plain_on_meshes(compiled.forward, model)
            return compiled
        return _plain_on_meshes(compiled, model)

    return compile


def _plain_on_meshes(compiled: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """What PyTorch has compiled, and the original itself in programs and where it meets tensors on meshes."""

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if current.recording is not None or _is_on_mesh(original, args, kwargs):
            return original(*args, **kwargs)
        return compiled(*args, **kwargs)

    return run


def _is_on_mesh(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    if any(isinstance(leaf, DistributedTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return True
    if isinstance(function, torch.nn.Module):
        return any(isinstance(parameter, DistributedTensor) for parameter in function.parameters())
    return bool(open_meshes()) and find_environment(function).mesh() is not None


torch.compile = _leaves_meshes(torch.compile)
