"""The facts about an overload that the recorder needs at each of its calls, and that do not change: they are found
once."""

from __future__ import annotations

import functools
from typing import Any

import torch

from monarch.compiler.ops.record import record
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.passes.numbers import number_arguments, takes_whole_numbers

_COMPOSITE = "CompositeImplicitAutograd"


class Facts:
    """Of one overload.

    `known`         what is known of the op: its record, which later entries write to
    `lifts`         its arguments that may be numbers known only when the step runs, and `whole`: integers too
    `moves`         it changes a tensor's shape in place
    `mutable`       it writes to arguments
    `view`          its results are views of its first operand
    """

    __slots__ = ("_composite", "_func", "known", "lifts", "moves", "mutable", "view", "whole")

    def __init__(self, func: Any) -> None:
        self.known = record(func.overloadpacket)
        self.lifts = number_arguments(func) if isinstance(func, torch._ops.OpOverload) else frozenset()
        self.whole = bool(self.lifts) and takes_whole_numbers(func)
        self.moves = torch.Tag.inplace_view in func.tags
        self.mutable: bool = func._schema.is_mutable
        self.view = not self.mutable and memory_of(func).view
        self._func = func
        # A user may give another op a kernel at any time, and that a tensor has a size is none to PyTorch.
        ours = func.namespace in ("aten", "prims") and self.known is not record(torch.ops.aten.size)
        self._composite = self._has_composite() if ours else None

    def _has_composite(self) -> bool:
        has, name = torch._C._dispatch_has_kernel_for_dispatch_key, self._func.name()
        return has(name, _COMPOSITE) and not has(name, "CPU")  # PyTorch prefers a kernel, as `silu_backward` has

    @property
    def composite(self) -> bool:
        """Whether PyTorch takes it apart into other ops."""
        return self._has_composite() if self._composite is None else self._composite


@functools.cache
def facts_of(func: Any) -> Facts:
    """The facts of an overload, found at its first call."""
    return Facts(func)
