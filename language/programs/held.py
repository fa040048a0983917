"""What a `Held` is: the contents that one Python object had when a trace first met it; and instances, by their
attributes. How the contents of other objects are read, compared and put back stands in `containers` and `kinds`."""

from __future__ import annotations

import functools
import types
from types import CodeType
from typing import Any, ClassVar, cast

import torch


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""What a name or cell holds that has no value."""

PLAIN: frozenset[type] = frozenset(
    (
        *(int, float, bool, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, _Missing),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, CodeType),
    )
)
"""Types whose values are compared by type and equality."""

Contents = tuple[list[Any], list[Any]]
"""An object's keys and values, in order."""


class Held:
    """One object, and what it held when it was first met."""

    by_identity: ClassVar[bool] = True
    """Whether another object with the same contents is another thing to the program; a list of the same entries is
    not."""

    __slots__ = ("before", "holder")

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.before = self.read(holder)

    @property
    def ident(self) -> int:
        """What the object is found by."""
        return id(self.holder)

    @classmethod
    def read(cls, holder: Any) -> Contents:
        raise NotImplementedError

    @classmethod
    def get(cls, holder: Any, key: Any) -> Any:
        """The value of one key, or MISSING."""
        return dict(zip(*cls.read(holder), strict=True)).get(key, MISSING)

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        """Give one key its value; MISSING takes it away."""
        raise NotImplementedError

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        """Make these the contents, in this order."""
        now = dict(zip(*cls.read(holder), strict=True))
        wanted = dict(zip(keys, values, strict=True))
        for key in now.keys() - wanted.keys():
            cls.put(holder, key, MISSING)
        for key, value in wanted.items():
            if now.get(key, MISSING) is not value:
                cls.put(holder, key, value)

    def changed(self) -> Contents | None:
        """The contents now; None where they are those noted."""
        now = self.read(self.holder)
        return None if same_entries(self.before, now) else now

    def restore(self) -> None:
        if self.changed() is not None:
            self.fill(self.holder, *self.before)


def same_entries(first: Contents, second: Contents) -> bool:
    """Whether both have the same objects under the same keys, in the same order."""
    return (
        len(first[0]) == len(second[0])
        and all(
            a is b or (type(a) is type(b) and type(a) is str and a == b)
            for a, b in zip(first[0], second[0], strict=True)
        )
        and all(a is b for a, b in zip(first[1], second[1], strict=True))
    )


class Attributes(Held):
    """An instance's `__dict__`."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        entries = holder.__dict__
        return list(entries), list(entries.values())

    @classmethod
    def get(cls, holder: Any, key: Any) -> Any:
        return holder.__dict__.get(key, MISSING)

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if value is MISSING:
            holder.__dict__.pop(key, None)
        else:
            holder.__dict__[key] = value

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        holder.__dict__.clear()
        holder.__dict__.update(zip(keys, values, strict=True))


@functools.cache
def has_dict(kind: Any) -> bool:
    """Whether instances of a class have a `__dict__`. They are not asked, for they may answer what they like."""
    return any("__dict__" in vars(base) for base in kind.__mro__)


@functools.cache
def is_program(kind: Any) -> bool:
    """Whether a class is that of programs. It is not asked, for a metaclass may answer what it likes."""
    return any("__wrapped_program__" in vars(base) for base in kind.__mro__)


@functools.cache
def slots_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The slots of a class, with their descriptors."""
    return tuple(
        (name, value)
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType) and "__slots__" in vars(base)
    )


class Slots(Held):
    """The slots of an instance that has any, and its `__dict__` where it has one."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        keys, values = Attributes.read(holder) if has_dict(cast("Any", type(holder))) else ([], [])
        for name, slot in slots_of(cast("Any", type(holder))):
            keys.append(name)
            try:
                values.append(slot.__get__(holder))
            except AttributeError:
                values.append(MISSING)
        return keys, values

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        slot = dict(slots_of(cast("Any", type(holder)))).get(key)
        if slot is None:
            Attributes.put(holder, key, value)
        elif value is not MISSING:
            slot.__set__(holder, value)
        elif slot.__get__(holder, type(holder)) is not MISSING:
            slot.__delete__(holder)


def same_plain(first: Any, second: Any) -> bool:
    """Whether two plain values are the same to a program: 1 is not True, nan is nan, and -0.0 is not 0.0."""
    if type(first) is not type(second) or type(first) not in PLAIN:
        return first is second
    if isinstance(first, (float, complex)):
        return repr(first) == repr(second)
    if isinstance(first, slice):
        return repr(first) == repr(second)
    return bool(first == second)
