"""Places in Python's objects that a trace depends on, and what is expected there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch.language.programs.held import MISSING, Attributes, Held, Slots, same_plain
from monarch.language.programs.kinds import TOLD, Class, Function, Names, Tensor

Path = tuple[Any, ...]
"""How a place is reached: where it starts, and a key for each step."""
Spot = tuple[int, int]
"""A place in a `Guards`: number of its node, and position among the node's values."""
MODULE = frozenset(
    "_backward_pre_hooks _backward_hooks _is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs "
    "_forward_hooks_always_called _forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_hooks "
    "_state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks _non_persistent_buffers_set "
    "_parameters _buffers _modules training".split()
)
"""The attributes of every `nn.Module`. Programs do not delete them; of hooks only their presence is checked."""
Live = dict[Spot, Any]
"""The values at places now."""


@dataclass
class Aliases:
    """Which places have the same container or the same moving tensor, and which another each: a change of one is seen
    where it is the same, and code may ask whether it is."""

    same: list[tuple[Spot, Spot]] = field(default_factory=list)
    apart: list[Spot] = field(default_factory=list)
    """One place of each container and of each moving tensor."""
    cells: list[tuple[Spot, Spot]] = field(default_factory=list)
    """Places whose tensors share their data."""
    tensors: set[int] = field(default_factory=set)
    """The tensors, by id, that must be the same objects as before: none of them is at a place in `apart`."""

    def hold(self, live: Live) -> bool:
        apart = {id(live[spot]) for spot in self.apart}
        return (
            all(live[first] is live[second] for first, second in self.same)
            and all(live[first]._ref.cell is live[second]._ref.cell for first, second in self.cells)
            and len(apart) == len(self.apart)
            and self.tensors.isdisjoint(apart)
        )


class Key:
    """A key that is no plain value, such as an optimizer's parameter: known by its id, and not kept alive."""

    __slots__ = ("ident",)

    def __init__(self, key: Any) -> None:
        self.ident = id(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.ident == self.ident

    def __hash__(self) -> int:
        return hash(self.ident)


@dataclass
class Node:
    """One object that is looked into: how it is found, which keys of it are read, and what is expected there."""

    kind: type[Held]
    type: type
    path: Path
    parent: Spot | None
    root: Any
    """Where it is no entry of another node: the object, a weak reference to it, or the number of an argument."""
    keys: list[Any]
    length: int
    """How many keys it has, read or not; of a class, how many entries."""
    absent: frozenset[str] = frozenset()
    """Names that the program may have asked for, and that it has not."""
    is_ordered: bool = False
    """Whether the program may have asked for an instance's names one after the other."""
    others: list[str] = field(default_factory=list)
    """The other names of an instance or class, whose values the program has not read: with their number, they say that
    it has no other, such as a `__call__`, which no code names."""
    reads_grad: bool = False
    """Whether the gradient of a tensor that needs none may have been read."""
    ids: list[int] = field(default_factory=list)
    plain: dict[int, Any] = field(default_factory=dict)
    """Plain values, by position: others need not be the same object."""
    is_weak: bool = False
    """Whether `root` is a weak reference that guards made."""
    special: dict[int, Callable[[Any], bool]] = field(default_factory=dict)
    """Positions whose value need not be the same object: whether another will do."""
    kept: list[Any] = field(default_factory=list)
    """Objects that cannot be watched, and are kept so that no other takes their id."""

    def holder(self, live: Live, arguments: list[Any]) -> Any:
        """The object that it looks into, as it is now."""
        if self.parent is not None:
            return live[self.parent]
        if isinstance(self.root, int):
            return arguments[self.root]
        return self.root() if self.is_weak else self.root

    def read_now(self, holder: Any) -> list[Any] | None:
        """The values at its places now; None where the object has another shape."""
        if type(holder) is not self.type:
            return None
        kind = self.kind
        if kind is Attributes:
            entries = holder.__dict__
            if len(entries) != self.length or not self.absent.isdisjoint(entries):
                return None
            if self.is_ordered and [*entries] != self.keys:
                return None
            return [entries.get(key, MISSING) for key in self.keys]
        if kind is Names:
            if self.length and len(vars(holder)) != self.length:
                return None
            return Names.look(holder, self.keys)
        if kind is Class:
            entries = vars(holder)
            if not self.absent.isdisjoint(entries) or self.length != len(entries):
                return None
            if any(key not in entries for key in self.others):
                return None
            return [getattr(holder, key[1:]) if key in TOLD else entries.get(key, MISSING) for key in self.keys]
        keys, values = kind.read(holder)
        if kind is Tensor and "_ref" in keys:
            at = keys.index("_ref")
            del keys[at], values[at]
        if kind is Slots or kind is Function:
            found = dict(zip(keys, values, strict=True))
            if len(found) != self.length or not self.absent.isdisjoint(found):
                return None
            return [found.get(key, MISSING) for key in self.keys]
        if len(keys) != len(self.keys):
            return None
        for was, now in zip(self.keys, keys, strict=True):
            if was is not now and not (was.ident == id(now) if type(was) is Key else same_plain(was, now)):
                return None
        return values

    def mismatch(self, values: list[Any], start: int = 0) -> int | None:
        """The first position that has another value than is expected."""
        for position in range(start, len(values)):
            value, special = values[position], self.special.get(position)
            if special is not None:
                if not special(value):
                    return position
            elif id(value) != self.ids[position] and not (
                position in self.plain and same_plain(self.plain[position], value)
            ):
                return position
        return None
