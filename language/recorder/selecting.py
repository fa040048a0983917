"""Indices that are tensors without dims, and whose numbers only the workers know: `x[i]`, `x[:, i] = v`,
`x.narrow(0, i, 2)`.

Outside of programs the number is asked for, as PyTorch does. In per-worker code each worker takes what its own number
says: that is no view, for `x` is the same on all workers.

Named sizes among an index's entries (`x[:, n // 2]`) are selected by as well: PyTorch takes their numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.errors import ProgramError
from monarch.language.recorder.known import known_value
from monarch.language.recorder.places import PlaceNode
from monarch.language.recorder.recording import current_program
from monarch.language.recorder.varying import varying_of
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def selected(x: torch.Tensor, index: Any) -> torch.Tensor:
    """`x[index]`; x is a tensor of any kind."""
    places, rest = _split(x, index)
    for dim, place in places:
        x = _select(x, dim, place)
    return torch.Tensor.__getitem__(x, rest) if rest or not places else x


def put(x: torch.Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`."""
    places, rest = _split(x, index)
    for dim, place in places:
        if _is_place(place) and _is_own(x, place):
            raise ProgramError(
                "each worker would write to a place of its own of a tensor that is the same on all workers",
                hint=f"x = monarch.vary(x, {varying_of(place)[0]!r})   # right: x is each worker's own\nx[i] = v",
                source=user_source(),
            )
        x = _select(x, dim, place)
    one = _one_for_all(x, rest, value)
    if one is None:
        torch.Tensor.__setitem__(x, rest or (...,), value)
    else:
        view, mask, value = one
        view.copy_(torch.where(mask, value, view))


def _one_for_all(x: torch.Tensor, index: tuple[Any, ...], value: Any) -> tuple[torch.Tensor, ...] | None:
    """Of `x[index] = value` with a mask among slices, and a value that needs a gradient and is the same wherever the
    mask is set: the part of `x` that the slices show, and mask and value as that broadcasts them. None for any other:
    PyTorch's gradient would select by the mask, whose number of hits only the workers know."""
    if not torch.is_grad_enabled() or not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    masks = [each for each in index if isinstance(each, DistributedTensor) and each.dtype is torch.bool]
    slices = [each for each in index if each is Ellipsis or isinstance(each, slice)]
    if len(masks) != 1 or len(masks) + len(slices) != len(index) or value.dtype != x.dtype:
        return None
    (mask,) = masks
    at = next(number for number, each in enumerate(index) if each is mask)
    view = x[(*index[:at], *(slice(None),) * mask.ndim, *index[at + 1 :])] if slices else x
    if Ellipsis in slices[:at]:
        after = len(index) - at - 1
    else:
        after = view.ndim - mask.ndim - at
    before = view.ndim - mask.ndim - after
    while value.ndim > before + 1 + after and value.shape[0] == 1:
        value = value[0]
    hits = value.ndim - 1 - after  # the dim of the value that the mask's hits are along
    if mask.shape != view.shape[before : before + mask.ndim] or value.ndim > before + 1 + after:
        return None
    if hits >= 0:
        if value.shape[hits] != 1:
            return None
        value = value.reshape(*value.shape[:hits], *(1,) * mask.ndim, *value.shape[hits + 1 :])
    return view, mask.view(*mask.shape, *(1,) * after), value


def narrow(x: torch.Tensor, dim: int, start: torch.Tensor, length: int) -> torch.Tensor:
    """`x.narrow(dim, start, length)`."""
    if not 0 <= length <= x.shape[dim] or not isinstance(start, DistributedTensor):
        return x.narrow(dim, 0 if isinstance(start, DistributedTensor) else int(start), length)  # PyTorch's error
    if _is_own(x, start) or not isinstance(x, DistributedTensor):
        from_end = torch.where(start < 0, start + x.shape[dim], start)
        return x.index_select(dim, from_end + torch.arange(length, dtype=start.dtype))
    held = _held(start)
    first, end = (torch.SymInt(PlaceNode(held, hint)) for hint in (0, length))
    made: torch.Tensor = aten.slice.Tensor(x, dim, first, end)
    return made


def _split(x: torch.Tensor, index: Any) -> tuple[list[tuple[int, Any]], tuple[Any, ...]]:
    """The places and named sizes among the entries of an index, the last one first, each with the dim of `x` at which
    it stands, and the index without them."""
    entries = list(index) if type(index) is tuple else [index]
    taken = [_taken(entry) for entry in entries]
    ellipsis = next((at for at, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    places, rest = [], []
    for at, entry in enumerate(entries):
        if isinstance(entry, torch.SymInt) or _is_place(entry):
            places.append((sum(taken[:at]) if at < ellipsis else x.ndim - sum(taken[at:]), entry))
        else:
            rest.append(entry)
    if any(not 0 <= dim < x.ndim for dim, _ in places):
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    return places[::-1], tuple(rest)


def _is_place(entry: Any) -> bool:
    return isinstance(entry, DistributedTensor) and not entry.ndim and entry.dtype in _NUMBERS


def _taken(entry: Any) -> int:
    """How many dims an entry of an index takes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


def _select(x: torch.Tensor, dim: int, place: Any) -> torch.Tensor:
    """`x.select(dim, place)`, a view of a distributed tensor."""
    if isinstance(place, torch.SymInt):
        return torch.Tensor.select(x, dim, place)
    recording = current_program()
    if recording is None and not varying_of(place):
        return torch.Tensor.select(x, dim, int(place))
    known = None if recording is None else known_value(recording, place)
    if known is not None:
        return torch.Tensor.select(x, dim, int(known))
    if _is_own(x, place) or not isinstance(x, DistributedTensor):
        return x.index_select(dim, torch.where(place < 0, place + x.shape[dim], place).reshape(1)).squeeze(dim)
    return torch.Tensor.select(x, dim, torch.SymInt(PlaceNode(_held(place), 0)))


def _is_own(x: torch.Tensor, place: DistributedTensor) -> bool:
    """Whether the place is each worker's own, and `x` is not."""
    own = varying_of(x) if isinstance(x, DistributedTensor) else ()
    return any(dim not in own for dim in varying_of(place))


def _held(place: DistributedTensor) -> Any:
    """A copy of the number as it is now."""
    held: Any = place.detach().to(torch.int64)
    return held.clone() if held._ref.cell is place._ref.cell else held
