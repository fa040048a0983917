"""The values that a module which was made on PyTorch's meta device begins with on the workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from monarch.compiler.errors import ProgramError
from monarch.language.recorder.dispatch import zeros
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor


@dataclass(frozen=True)
class Unmade:
    """A module with tensors on the meta device, and its tensors that are computed from parametrizations with some
    there: by name their shapes and dtypes."""

    owner: nn.Module
    computed: dict[str, tuple[torch.Size, torch.dtype]]


def unmade_parts(module: nn.Module) -> list[Unmade]:
    """The parts of a module, itself among them, that have tensors of their own on the meta device."""
    found = []
    for owner in module.modules():
        computed = {}
        if is_parametrized(owner):
            for name, made_from in owner.parametrizations.items():  # type: ignore[union-attr, operator]
                if any(slot.is_meta for slot in own_tensors(made_from)):
                    value = getattr(owner, name)
                    computed[name] = value.shape, value.dtype
        if computed or any(slot.is_meta for slot in own_tensors(owner)):
            found.append(Unmade(owner, computed))
    return found


def give_values(module: nn.Module, unmade: Sequence[Unmade], mesh: Mesh) -> None:
    """Have modules that were made on the meta device, and now have zeros on the workers, give themselves values: by the
    module's `_init_weights(part)` or the parts' `reset_parameters()`. Tensors that get no value so are NaN, or the
    least whole number, where a checkpoint may have them. Raises ProgramError for tensors that none has."""
    given = {id(slot): slot._version for part in unmade for slot in own_tensors(part.owner) if slot.numel()}
    whole: Callable[[nn.Module], None] | None = getattr(type(module), "_init_weights", None)
    with torch.no_grad():
        for part in reversed(unmade) if whole else unmade:  # parts before what they are parts of, as transformers does
            if whole is not None:
                _initialise(part, mesh, lambda owner: whole(module, owner))  # type: ignore[call-arg]
            elif callable(getattr(part.owner, "reset_parameters", None)):
                _initialise(part, mesh, lambda owner: owner.reset_parameters())  # type: ignore[operator]
    by = "_init_weights()" if whole else "reset_parameters()"
    saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    without = []
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, slot in named:
        if given.get(id(slot)) != slot._version:
            continue
        if id(slot) not in saved:
            raise ProgramError(
                f"'{name}' was made on the meta device, and {by} gives it no value, and no checkpoint has it",
                hint="make the module on the CPU, or give the buffer its value in reset_parameters().",
                source=user_source(),
            )
        without.append(name)
        with torch.no_grad():
            slot.fill_(_nothing(slot.dtype))
    if without:
        shown = ", ".join(f"'{name}'" for name in without[:8]) + (", ..." if len(without) > 8 else "")
        warnings.warn(
            f"made on the meta device, NaN until monarch.load() gives them values: {shown}",
            stacklevel=3,
        )


def _initialise(part: Unmade, mesh: Mesh, initialise: Callable[[nn.Module], None]) -> None:
    """Have a module give its tensors values. One that is computed from parametrizations is a plain one meanwhile; its
    originals get the values that give it, where the parametrizations can invert it."""
    owner, cls = part.owner, type(part.owner)
    if not part.computed:
        initialise(owner)
        return
    owner.__class__ = cls.__bases__[0]  # of which parametrizations have made a subclass with properties
    try:
        for name, (shape, dtype) in part.computed.items():
            owner._parameters[name] = nn.Parameter(zeros(mesh, shape, dtype))
        initialise(owner)
        values = {name: owner._parameters.pop(name) for name in part.computed}
    finally:
        for name in part.computed:
            owner._parameters.pop(name, None)
        owner.__class__ = cls
    for name, value in values.items():
        made_from: Any = owner.parametrizations[name]  # type: ignore[index]
        if value is None or not value._version or not all(hasattr(each, "right_inverse") for each in made_from):
            continue
        found: Any = value.detach()
        for each in reversed(made_from):
            found = each.right_inverse(found)
        originals = [made_from.original] if made_from.is_tensor else _originals(made_from)
        for original, start in zip(originals, [found] if made_from.is_tensor else found, strict=True):
            original.copy_(start)


def _originals(made_from: ParametrizationList) -> list[DistributedTensor]:
    return [getattr(made_from, f"original{number}") for number in range(made_from.ntensors)]


def _nothing(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The module's parameters and buffers that are no other module's."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


__all__ = ["Unmade", "give_values", "own_tensors", "unmade_parts"]
