"""Calls that are alike, as those of equal layers are: passes do their work on one of them, and remember it by a key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch.fx import Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

V = TypeVar("V")


class Memo(Generic[V]):
    """The result for each key. It has at most `most` of them: where there would be more it begins anew."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: dict[Hashable, V] = {}

    def get(self, key: Hashable) -> V | None:
        return self._found.get(key)

    def keep(self, key: Hashable, found: V) -> V:
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[key] = found
        return found


def frozen(value: Any, of: Callable[[Any], Hashable]) -> Hashable:
    """A call's argument as a key: equal for arguments that are alike. `of` gives the key of a node or a tensor.

    In Python 1 == 1.0 == True and 0.0 == -0.0: here these differ. Raises TypeError for an argument without a hash."""
    kind = type(value)
    if kind is Node or kind is torch.Tensor:
        return of(value)
    if value is None or kind is int:
        return value
    if kind in (immutable_list, tuple, list):
        return tuple([frozen(item, of) for item in value])
    if kind in (immutable_dict, dict):
        return tuple([(name, frozen(item, of)) for name, item in value.items()])
    if kind in (float, complex):
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{kind} has no key")
    hash(value)
    return kind, value
