"""Functions of PyTorch that take their results' sizes as numbers of C: in programs of named sizes they are made of
others that take symbols.

Only programs of named sizes load this.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.sym_node import SymNode
from torch.overrides import TorchFunctionMode, resolve_name

from monarch.language.recorder.composites import one_hot
from monarch.language.recorder.selecting import put, selected
from monarch.language.source import user_source

_BACKWARD = re.compile(r"Backward\d*$")
_SYMBOLS = (torch.SymInt, torch.SymFloat)


class NamedSizes(TorchFunctionMode):
    """While a program of named sizes is traced."""

    def __init__(self) -> None:
        super().__init__()
        self._running: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._running = self._running, self._running or func
        try:
            form = _FORMS.get(func)
            if form is not None and (form in _OF_SHAPES or _has_symbols((*args, *(kwargs or {}).values()))):
                made = form(*args, **(kwargs or {}))
                if made is not NotImplemented:
                    return made
            return func(*args, **(kwargs or {}))
        finally:
            self._running = outer

    def where(self) -> str:
        """The user's line, and the function there: "train.py:3:9: torch.tril_indices", "train.py:4:14:
        range(x.shape[0])", "train.py:9: the gradient of cumprod"."""
        node: Any = torch._C._current_autograd_node()
        source = user_source()
        if node is not None:
            what = f"the gradient of {_BACKWARD.sub('', node.name()).lower()}"
        elif self._running is not None:
            what = resolve_name(self._running) or getattr(self._running, "__name__", "PyTorch")
        else:
            what = "" if source is None else source.text
        return f"{source}: {what}" if source is not None and what else what or f"{source}"


def _has_symbols(values: Any) -> bool:
    return any(_has_symbols(value) if isinstance(value, (list, tuple)) else _is_symbol(value) for value in values)


def _is_symbol(value: Any) -> bool:
    """Whether it is a named size, or computed from such: other symbols stand for numbers that only a call knows."""
    return isinstance(value, _SYMBOLS) and isinstance(value.node, SymNode)


def _linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, base: Any = None, **options: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if options.keys() - {"device", "requires_grad"} or not dtype.is_floating_point:
        return NotImplemented
    if not all(isinstance(each, (int, float, *_SYMBOLS)) for each in (start, end)):
        return NotImplemented
    places = torch.arange(steps, dtype=dtype)
    step = torch.full((), end - start, dtype=dtype) / (steps - 1)
    # From both ends, as PyTorch reckons.
    made = torch.where(places < steps // 2, start + step * places, end - step * ((steps - 1) - places))
    made = made if base is None else torch.pow(base, made)
    return made.requires_grad_(bool(options.get("requires_grad")))


def _logspace(start: Any, end: Any, steps: Any, base: float = 10.0, **options: Any) -> Any:
    return _linspace(start, end, steps, base=base, **options)


def _arange(*ends: Any, dtype: Any = None, **options: Any) -> Any:
    """Of floats that are whole numbers: PyTorch computes how many there are with floats."""
    if not any(isinstance(each, float) for each in ends):
        return NotImplemented
    if not all(isinstance(each, torch.SymInt) or (math.isfinite(each) and each == int(each)) for each in ends):
        return NotImplemented
    whole: list[Any] = [each if isinstance(each, torch.SymInt) else int(each) for each in ends]
    return torch.arange(*whole, dtype=dtype or torch.get_default_dtype(), **options)


def _tensor(data: Any, *, dtype: Any = None, requires_grad: bool = False, **options: Any) -> Any:
    numbers = list(_leaves(data))
    if options.keys() - {"device"} or not all(isinstance(each, (int, float, *_SYMBOLS)) for each in numbers):
        return NotImplemented
    if dtype is None:
        whole = all(isinstance(each, (int, torch.SymInt)) for each in numbers)
        dtype = torch.int64 if whole else torch.get_default_dtype()
    return _stacked(data, dtype).requires_grad_(requires_grad)


def _leaves(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        for each in data:
            yield from _leaves(each)
    else:
        yield data


def _stacked(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(each, dtype) for each in data])
    return torch.full((), data, dtype=dtype)


def _take_along_dim(x: Any, indices: Any, dim: Any = None, **options: Any) -> Any:
    if options or dim is None or x.ndim != indices.ndim or not -x.ndim <= dim < x.ndim or indices.dtype != torch.int64:
        return NotImplemented
    dim %= x.ndim
    shapes = [[1 if at == dim else size for at, size in enumerate(each.shape)] for each in (x, indices)]
    shape = torch.broadcast_shapes(*shapes)
    full = [[*shape[:dim], each.shape[dim], *shape[dim + 1 :]] for each in (x, indices)]
    return x.expand(full[0]).gather(dim, indices.expand(full[1]))


def _unflatten(x: Any, dim: Any, *sizes: Any) -> Any:
    """With the size that -1 stands for: PyTorch takes the sizes that it follows from as numbers."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim or sizes.count(-1) != 1 or not _is_symbol(x.shape[dim]):
        return NotImplemented
    others = -math.prod(sizes)
    if isinstance(others, int) and others < 1:
        return NotImplemented
    return x.unflatten(dim, [x.shape[dim] // others if size == -1 else size for size in sizes])


def _block_diag(*tensors: Any) -> Any:
    """PyTorch's gradient takes the sizes as numbers."""
    if not all(isinstance(each, torch.Tensor) and each.ndim < 3 for each in tensors):
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    parts = [each.to(dtype).reshape(1, -1) if each.ndim < 2 else each.to(dtype) for each in tensors]
    widths = [part.shape[1] for part in parts]
    rows = [F.pad(part, (sum(widths[:at]), sum(widths[at + 1 :]))) for at, part in enumerate(parts)]
    return torch.cat(rows)


_OF_SHAPES = (_block_diag, _take_along_dim, _unflatten)
"""Those that are for sizes of a tensor, whatever the other arguments are."""
_FORMS: dict[Any, Any] = {
    torch.block_diag: _block_diag,
    torch.linspace: _linspace,
    torch.logspace: _logspace,
    torch.arange: _arange,
    torch.tensor: _tensor,
    torch._C._nn.one_hot: one_hot,
    torch.Tensor.__getitem__: selected,
    torch.Tensor.__setitem__: put,
    **dict.fromkeys((torch.unflatten, torch.Tensor.unflatten), _unflatten),
    **dict.fromkeys((torch.take_along_dim, torch.Tensor.take_along_dim), _take_along_dim),
}
