"""A model's calls, run apart from the program: on tensors without data, or with made-up numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from monarch.language.tensors.tensor import DistributedTensor
from monarch.stdlib.pipeline.inner import one_by_one, transform

MOST = 2**24
"""Elements of a tensor, and of all together, up to which numbers are made up and computed with."""


_NO_CALLS = (torch._C._set_grad_enabled, torch.device)
"""Functions that a device or PyTorch's own modules call, and that compute nothing."""


READS = frozenset(("numel", "item", "__bool__", "__int__", "__float__", "__index__"))
"""Functions that give Python a number. A mesh's tensors call others for it than plain tensors do."""


class Diverged(Exception):
    """The model calls other functions from here on."""


class TooLarge(Exception):
    """A model is too large for a dry run on numbers."""


class DryRun(TorchFunctionMode):
    """Runs PyTorch's functions on a device that is no mesh, and calls `called` for each."""

    def __init__(self, device: str) -> None:
        """`device` is "meta", or "cpu": there tensors of a mesh have made-up numbers."""
        super().__init__()
        self._device = device
        self._left = MOST
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The stand-ins of tensors with data, by their ids."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._standing, (args, kwargs or {}))
        if func is torch.autograd.grad and kwargs.get("is_grads_batched") and transform() is None:
            return one_by_one(lambda f, *args, **kwargs: self.__torch_function__(f, types, args, kwargs), args, kwargs)
        result = func(*args, **kwargs)
        self._take(result)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            self.read(func, args, result)
        elif func not in _NO_CALLS and name not in READS and transform() is None:
            self.called(func, name, args, kwargs, result)
        return result

    def called(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """The model has called `func`, with this result."""
        raise NotImplementedError

    def read(self, func: Any, args: Any, result: Any) -> None:
        """The model has read an attribute of a tensor, such as `x.T`."""

    def _standing(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or (self._device == "cpu" and not isinstance(tensor, DistributedTensor)):
            return tensor
        if id(tensor) not in self._known:
            made = made_up(examples(tensor.shape), tensor.dtype, self._device)
            self._take(made)
            self._known[id(tensor)] = tensor, made.requires_grad_(tensor.requires_grad)
        return self._known[id(tensor)][1]

    def _take(self, result: Any) -> None:
        if self._device == "cpu":
            self._left -= sum(each.numel() for each in tensors_of(result))
            if self._left < 0:
                raise TooLarge(f"it computes more than {MOST} elements")


def examples(shape: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of a shape, for named ones the example's, without a decision on them: a dry run takes the way of the
    program, and its trace decides on that."""
    return tuple([size.node.hint if isinstance(size, torch.SymInt) else size for size in shape])


def made_up(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """A tensor of numbers that follow from its shape: integers are 0, which most functions take as an index."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(dtype)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in it, in order."""
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]
