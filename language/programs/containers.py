"""Lists, dicts, sets and their like, as programs hold them. Methods of the user's own classes are not called."""

from __future__ import annotations

import collections
import functools
from typing import Any, ClassVar

from monarch.language.programs.held import MISSING, Attributes, Contents, Held, Slots


class Mapping(Held):
    """A dict. Methods of the user's, which may do more, are not called."""

    by_identity = False

    @classmethod
    def read(cls, holder: Any) -> Contents:
        if isinstance(holder, collections.OrderedDict):  # its order is its own, not that of the dict that it is
            keys = list(collections.OrderedDict.keys(holder))
            return keys, [dict.__getitem__(holder, key) for key in keys]
        return list(dict.keys(holder)), list(dict.values(holder))

    @classmethod
    def get(cls, holder: Any, key: Any) -> Any:
        return dict.get(holder, key, MISSING)

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        kind = _dict_of(holder)
        if value is not MISSING:
            kind.__setitem__(holder, key, value)
        elif dict.__contains__(holder, key):
            kind.__delitem__(holder, key)

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        kind = _dict_of(holder)
        kind.clear(holder)
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(holder, key, value)


def _dict_of(holder: Any) -> Any:
    return collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict


class Sequence(Held):
    """A list or tuple: its keys are numbers. Methods of the user's are not called."""

    by_identity = False
    kinds: ClassVar[tuple[Any, ...]] = (list, tuple, collections.deque)

    @classmethod
    def read(cls, holder: Any) -> Contents:
        values = list(_base(cls, holder).__iter__(holder))
        return list(range(len(values))), values

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        list.__setitem__(holder, key, value)

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        kind = _base(cls, holder)
        if kind is tuple:
            return
        kept = list(kind.__iter__(holder))
        if len(kept) <= len(values) and all(a is b for a, b in zip(kept, values, strict=False)):
            kind.extend(holder, values[len(kept) :])
        else:
            kind.clear(holder)
            kind.extend(holder, values)


class Members(Held):
    """A set: its keys are numbers, in the order in which it is iterated."""

    by_identity = False
    kinds: ClassVar[tuple[Any, ...]] = (set, frozenset)

    @classmethod
    def read(cls, holder: Any) -> Contents:
        values = list(_base(cls, holder).__iter__(holder))
        return list(range(len(values))), values

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        if isinstance(holder, set):
            set.clear(holder)
            set.update(holder, values)


def _base(kind: Any, holder: Any) -> Any:
    return next(base for base in kind.kinds if isinstance(holder, base))


class Attribute:
    """The key of an attribute, beside those of a container's entries. Equal names are one object."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_attribute = functools.cache(Attribute)


class _Led(Held):
    """A container whose first key stands for an attribute of its own."""

    attribute: ClassVar[str]

    @classmethod
    def read(cls, holder: Any) -> Contents:
        keys, values = super().read(holder)
        return [_attribute(cls.attribute), *keys], [getattr(holder, cls.attribute), *values]

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        super().fill(holder, keys[1:], values[1:])


class Deque(_Led, Sequence):
    """A deque: how long it may be, and its entries."""

    attribute = "maxlen"


class Defaulting(_Led, Mapping):
    """A defaultdict: what makes its entries, and these."""

    attribute = "default_factory"

    @classmethod
    def get(cls, holder: Any, key: Any) -> Any:
        return holder.default_factory if isinstance(key, Attribute) else super().get(holder, key)

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if isinstance(key, Attribute):
            holder.default_factory = value
        else:
            super().put(holder, key, value)

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        holder.default_factory = values[0]
        super().fill(holder, keys, values)


class Own(Held):
    """A container of a class of the user's: its entries, and its attributes."""

    by_identity = False

    @classmethod
    def read(cls, holder: Any) -> Contents:
        keys, values = _container_kind(holder).read(holder)
        return [*keys, *map(_attribute, holder.__dict__)], [*values, *holder.__dict__.values()]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if isinstance(key, Attribute) and key.name != "default_factory":
            Attributes.put(holder, key.name, value)
        else:
            _container_kind(holder).put(holder, key, value)

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        kind = _container_kind(holder)
        first = 1 if issubclass(kind, _Led) else 0
        count = next((at for at, key in enumerate(keys) if at >= first and isinstance(key, Attribute)), len(keys))
        kind.fill(holder, keys[:count], values[:count])
        Attributes.fill(holder, [key.name for key in keys[count:]], values[count:])


def _container_kind(value: Any) -> type[Held]:
    return next(held for container, held in CONTAINERS if isinstance(value, container))


CONTAINERS: tuple[tuple[type, type[Held]], ...] = (
    (collections.defaultdict, Defaulting),
    (dict, Mapping),
    (list, Sequence),
    (tuple, Sequence),
    (collections.deque, Deque),
    (set, Members),
    (frozenset, Members),
)


HAS_CLASS = (Attributes, Slots, Own, Mapping, Defaulting, Sequence, Deque, Members)
"""Objects of the user's classes, whose methods the program may call."""
