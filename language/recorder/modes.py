"""The modes in which code runs while a program is traced, and in per-worker code: there, factory functions make
distributed tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from monarch.language.recorder.dispatch import dispatch, is_distributed, record, tensors_in, writes_of
from monarch.language.recorder.known import known_value
from monarch.language.recorder.recording import Recording, current
from monarch.language.recorder.refused_writes import plain_write
from monarch.language.recorder.selecting import put, selected
from monarch.language.recorder.varying import active, made_to_vary
from monarch.language.source import shorten
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten


class _Factories(TorchDispatchMode):
    """While a program is traced: factory functions make replicated tensors, and plain tensors from outside are not
    written to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load TorchDynamo on the first call only to keep it out."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watching = sys.gettrace()  # which functions the program enters: none of its own is entered from here
        sys.settrace(None)
        try:
            return self._dispatch(func, args, kwargs or {})
        except Exception as error:
            shorten(error)
            raise
        finally:
            sys.settrace(watching)

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        recording = current.recording
        assert recording is not None
        if is_distributed(args, kwargs):
            if not func._schema.is_mutable or (plain_args := _of_plain(recording, func, args, kwargs)) is None:
                return dispatch(func, args, kwargs)
            args, kwargs = plain_args
        plain = list(tensors_in((*args, *kwargs.values())))
        if func is aten.lift_fresh.default:
            return _literal(recording, args[0])
        if plain and recording.symbols is not None and _has_symbols((*args, *kwargs.values())):
            # PyTorch's kernels take no symbols: the workers have the tensor, and make values of a named size of it.
            args, kwargs = pytree.tree_map_only(torch.Tensor, recording.read_only, (args, kwargs))
            return dispatch(func, args, kwargs)
        if plain:
            for tensor in tensors_in(writes_of(func, args, kwargs).values()):
                if not recording.is_own(tensor):
                    raise plain_write(tensor)
            result = func(*args, **kwargs)
            recording.computed(plain, result)
            return result
        if not any("Tensor" in str(value.type) for value in func._schema.returns):
            return func(*args, **kwargs)
        return dispatch(func, args, kwargs)


def _of_plain(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of a call that writes to plain tensors of the program's own (`mask[0] = 1.0`), with plain tensors
    for all others; None where these are not known while the program is traced."""
    if not all(recording.is_own(tensor) for tensor in tensors_in(writes_of(func, args, kwargs).values())):
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, DistributedTensor):
            leaves[at] = known_value(recording, leaf)
            if leaves[at] is None:
                return None
    return pytree.tree_unflatten(leaves, spec)


def _has_symbols(values: Any) -> bool:
    return any(
        _has_symbols(value) if isinstance(value, (list, tuple)) else isinstance(value, torch.SymInt) for value in values
    )


def _literal(recording: Recording, tensor: torch.Tensor) -> DistributedTensor:
    """`torch.tensor(3.0)` in a program."""
    if tensor.numel() == 1:
        value = tensor.item()
        made: DistributedTensor = record(
            aten.full.default, (list(tensor.shape), value), {"dtype": tensor.dtype}, recording.mesh
        )
        return made
    return recording.constant(tensor, own=True)


@contextmanager
def tracing(recording: Recording) -> Iterator[None]:
    """Let this thread's calls go to a program's recording; factory functions make replicated tensors meanwhile."""
    before, current.recording = current.recording, recording
    try:
        with _Factories():
            yield
    finally:
        current.recording = before


# -- per-worker code -------------------------------------------------------------------------------------------------


class _Mixing(TorchFunctionMode):
    """In per-worker code: a value that needs a gradient is made to vary where it meets one that varies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = made_to_vary(func, args, kwargs or {})
        if func is torch.Tensor.__getitem__:
            return selected(*args)
        if func is torch.Tensor.__setitem__:
            return put(*args)
        return func(*args, **kwargs)


class _OnMesh(TorchDispatchMode):
    """In per-worker code outside of programs: factory functions make tensors of the mesh, as they do in programs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_distributed(args, kwargs):
            takes = next(tensors_in((*args, *kwargs.values())), None) is not None
            makes = any("Tensor" in str(value.type) for value in func._schema.returns)
            if takes or not makes or not active.regions:
                return func(*args, **kwargs)
        return dispatch(func, args, kwargs)


@contextmanager
def per_worker(mesh: Mesh, dims: tuple[str, ...]) -> Iterator[None]:
    """Write per-worker code of `mesh` along these mesh dims. ProgramError where it is of another mesh than the code
    around it."""
    program = current.recording
    if program is not None:
        program.join(mesh)
    before = active.regions
    active.regions = (*before, (mesh, dims))
    try:
        with _Mixing(), nullcontext() if program is not None else _OnMesh():
            yield
    finally:
        active.regions = before
