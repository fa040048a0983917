"""The kinds of Python objects that a program can reach: how the contents of each are read, compared and put back.

A `Held` keeps the contents that one object had when it was first met.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import gc
import types
import weakref
from collections.abc import Iterable
from types import CodeType, MethodType, ModuleType
from typing import Any, ClassVar, cast

import numpy as np
import torch

from monarch.language.source import is_installed, is_users_file
from monarch.language.tensors.plain import LARGE
from monarch.language.tensors.tensor import DistributedTensor


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


class Deque(Sequence):
    """A deque: how long it may be, and its entries."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        keys, values = super().read(holder)
        return [_attribute("maxlen"), *keys], [holder.maxlen, *values]

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        super().fill(holder, keys[1:], values[1:])


class Defaulting(Mapping):
    """A defaultdict: what makes its entries, and these."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        keys, values = super().read(holder)
        return [_attribute("default_factory"), *keys], [holder.default_factory, *values]

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
        super().fill(holder, keys[1:], values[1:])


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
        first = 1 if kind in (Deque, Defaulting) else 0
        count = next((at for at, key in enumerate(keys) if at >= first and isinstance(key, Attribute)), len(keys))
        kind.fill(holder, keys[:count], values[:count])
        Attributes.fill(holder, [key.name for key in keys[count:]], values[count:])


def _container_kind(value: Any) -> type[Held]:
    return next(held for container, held in CONTAINERS if isinstance(value, container))


TOLD = "@__name__", "@__qualname__", "@__doc__"
"""What functions and classes say of themselves, as keys."""


def _told(holder: Any) -> list[Any]:
    return [text if type(text) is str else None for text in (holder.__name__, holder.__qualname__, holder.__doc__)]


class Function(Held):
    """A function: its code, defaults, the variables that it closes over, its attributes (with a dot before), and what
    it says of itself."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        keys: list[Any] = ["__code__", "__defaults__", "__kwdefaults__"]
        values: list[Any] = [holder.__code__, holder.__defaults__, holder.__kwdefaults__]
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False):
            keys.append(name)
            try:
                values.append(cell.cell_contents)
            except ValueError:
                values.append(MISSING)
        for name, value in holder.__dict__.items():
            keys.append(f".{name}")
            values.append(value)
        return [*keys, *TOLD], [*values, *_told(holder)]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if key.startswith("."):
            Attributes.put(holder, key[1:], value)
        elif key in TOLD:
            setattr(holder, key[1:], value)
        elif key in holder.__code__.co_freevars:
            cell = holder.__closure__[holder.__code__.co_freevars.index(key)]
            if value is MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = value
        else:
            setattr(holder, key, value)


class Parts(Held):
    """The parts of a method, partial, weak reference, property or program, which never change."""

    by_identity = False
    names: ClassVar[dict[type, tuple[str, ...]]] = {
        MethodType: ("__self__", "__func__"),
        functools.partial: ("func", "args", "keywords", "__dict__"),
        property: ("fget", "fset", "fdel"),
        staticmethod: ("__func__",),
        classmethod: ("__func__",),
        functools.cached_property: ("func",),
        types.BuiltinMethodType: ("__self__",),
    }

    @classmethod
    def read(cls, holder: Any) -> Contents:
        if isinstance(holder, weakref.ref):
            return ["()"], [holder()]
        if isinstance(holder, types.MappingProxyType):
            return ["[]"], gc.get_referents(holder)[:1]
        if isinstance(holder, functools._lru_cache_wrapper):
            held = [holder.__wrapped__, *_remembered(holder)]
            return list(range(len(held))), held
        names = next((names for kind, names in cls.names.items() if isinstance(holder, kind)), ("__wrapped__",))
        return list(names), [getattr(holder, name) for name in names]

    def changed(self) -> Contents | None:
        return None


def _remembered(cached: Any) -> list[Any]:
    """The arguments and results that an `lru_cache` remembers, which only the garbage collector is shown."""
    found: list[Any] = []
    for value in gc.get_referents(cached):
        if type(value) is dict and value is not cached.__dict__:
            entries = [each for each in value.values() if type(each).__name__ != "_lru_list_elem"]
            found += [len(value), *entries]
        elif not isinstance(value, type):
            found.append(value)
    return found


class Variable(Held):
    """A `contextvars.ContextVar`: its value in the caller's context."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        return ["()"], [holder.get(MISSING)]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if (
            value is MISSING
        ):  # without its token a variable cannot be taken back its first value: it is given its default
            try:
                value = contextvars.Context().run(holder.get)
            except LookupError:
                return
        holder.set(value)


class Class(Held):
    """A class of the user's: its methods and attributes, not its bases', and what it says of itself."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        entries = {key: value for key, value in vars(holder).items() if key not in CLASS_MACHINERY}
        return [*entries, *TOLD], [*entries.values(), *_told(holder)]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if key in TOLD:
            setattr(holder, key[1:], value)
        elif value is MISSING:
            type.__delattr__(holder, key)
        else:
            type.__setattr__(holder, key, value)


CLASS_MACHINERY = frozenset(
    "__doc__ __module__ __dict__ __weakref__ __qualname__ __annotations__ __abstractmethods__ _abc_impl __slots__ "
    "__firstlineno__ __static_attributes__ __parameters__ __orig_bases__ __dataclass_fields__".split()
)


class Names(Held):
    """Some names of a module, or of a function's globals: those that code names."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.before = [], []
        self._noted: set[str] = set()

    @property
    def ident(self) -> int:
        """That of globals is no dict's: code may reach the same dict as data too."""
        return id(self.holder) if isinstance(self.holder, ModuleType) else ~id(self.holder)

    @property
    def is_librarys(self) -> bool:
        """Whether it is a module of Python's, PyTorch's or ours."""
        return isinstance(self.holder, ModuleType) and not (
            is_users_module(self.holder) or is_users_own_module(self.holder)
        )

    @property
    def is_users_own(self) -> bool:
        return isinstance(self.holder, ModuleType) and is_users_own_module(self.holder)

    def note(self, name: str) -> Any:
        """The value of a name, noted once."""
        keys, values = self.before
        if name in self._noted:
            return MISSING
        self._noted.add(name)
        (value,) = self.look(self.holder, [name])
        keys.append(name)
        values.append(value)
        return value

    def changed(self) -> Contents | None:
        now = self.look(self.holder, self.before[0])
        return None if same_entries(self.before, (self.before[0], now)) else (self.before[0], now)

    @staticmethod
    def look(holder: Any, names: Iterable[str]) -> list[Any]:
        if isinstance(holder, ModuleType) and type(holder) is not ModuleType:  # PyTorch's backends have properties
            return [getattr(holder, name, MISSING) for name in names]
        entries = vars(holder) if isinstance(holder, ModuleType) else holder
        return [entries.get(name, MISSING) for name in names]

    @classmethod
    def get(cls, holder: Any, key: Any) -> Any:
        return cls.look(holder, [key])[0]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        entries = vars(holder) if isinstance(holder, ModuleType) else holder
        if value is MISSING:
            entries.pop(key, None)
        elif key not in entries and isinstance(holder, ModuleType) and hasattr(holder, key):
            setattr(holder, key, value)  # a property of one of PyTorch's backends
        else:
            entries[key] = value

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            cls.put(holder, key, value)


ASKED = "requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks"
"""What every tensor is asked for, beside its `__dict__`."""


class Tensor(Held):
    """A tensor: what Python can see of it, and which data it has."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        own = holder.__dict__
        keys: list[Any] = [*ASKED]
        values: list[Any] = [
            holder.requires_grad,
            holder.grad if holder.is_leaf else None,
            holder._backward_hooks,
            holder._post_accumulate_grad_hooks,
        ]
        if not isinstance(holder, DistributedTensor) and holder.layout is torch.strided:
            keys += ["_version", "data_ptr", "shape", "bytes"]
            address = _address(holder)
            values += [holder._version, address, holder.shape, _bytes(holder) if address else b""]
        for key, value in own.items():
            keys.append(key)
            values.append(value)
        return keys, values

    @classmethod
    def get(cls, holder: Any, key: Any) -> Any:
        if key in ASKED:
            return getattr(holder, key)
        return Attributes.get(holder, key)

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if key == "requires_grad":
            holder.requires_grad_(value)
        elif key == "grad":
            holder.grad = value
        elif key in ASKED:
            setattr(holder, key, value)
        elif key not in _READ_ANEW:
            Attributes.put(holder, key, value)

    def changed(self) -> Contents | None:
        # Each reading makes new objects of these, also where nothing has changed.
        keys, values = self.read(self.holder)
        before = dict(zip(*self.before, strict=True))
        now = [
            before[key] if key in _READ_ANEW and before.get(key) == value else value
            for key, value in zip(keys, values, strict=True)
        ]
        return None if same_entries(self.before, (keys, now)) else (keys, now)


_READ_ANEW = ("_version", "data_ptr", "shape", "bytes")


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without storage
        return 0


def _bytes(tensor: torch.Tensor) -> bytes:
    """The content of a plain tensor, or of the memory that it is a part of: `tensor.data`, an array with the same
    memory and another process change it and leave its version as it is. Empty where it is too large."""
    start, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    if not tensor.is_contiguous():
        memory = tensor.untyped_storage()
        start, size = memory.data_ptr(), memory.nbytes()
    if size > LARGE and tensor.untyped_storage().resizable():  # others have an array's memory
        return b""
    return ctypes.string_at(start, size) if tensor.device.type == "cpu" else b""


class Array(Held):
    """A numpy array, by its bytes: they are no constants of Python's. What changes one cannot be repeated."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        return ["dtype", "shape", "bytes"], [str(holder.dtype), holder.shape, holder.tobytes()]

    def changed(self) -> Contents | None:
        now = self.read(self.holder)
        return None if now == self.before else now

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        kind, shape, content = values
        if holder.flags.writeable and (str(holder.dtype), holder.shape) == (kind, shape):
            if holder.dtype.hasobject:
                return  # its bytes are addresses
            holder[...] = np.frombuffer(content, holder.dtype).reshape(shape)


class Memory(Array):
    """A `bytearray`, or an array of Python's module `array`."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        return ["bytes"], [bytes(holder)]

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        holder[:] = (
            type(holder)(values[0]) if isinstance(holder, bytearray) else array.array(holder.typecode, values[0])
        )


class Logger(Held):
    """A logger: which levels it logs, and to which handlers."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        found = {
            "level": holder.level,
            "disabled": holder.disabled,
            "propagate": holder.propagate,
            "effective": holder.getEffectiveLevel(),
            "disable": getattr(holder.manager, "disable", 0),
            "has": holder.hasHandlers(),
        }
        several = [*holder.handlers, *holder.filters]
        return [*found, *range(len(several))], [*found.values(), *several]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if key == "level":
            holder.setLevel(value)
        elif key in ("disabled", "propagate"):
            setattr(holder, key, value)


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


def same_plain(first: Any, second: Any) -> bool:
    """Whether two plain values are the same to a program: 1 is not True, nan is nan, and -0.0 is not 0.0."""
    if type(first) is not type(second) or type(first) not in PLAIN:
        return first is second
    if isinstance(first, (float, complex)):
        return repr(first) == repr(second)
    if isinstance(first, slice):
        return repr(first) == repr(second)
    return bool(first == second)


def is_users_module(module: ModuleType) -> bool:
    """Whether a module is the user's or an installed library's."""
    file = module.__dict__.get("__file__")
    return file is not None and is_users_file(file)


def is_users_own_module(module: ModuleType) -> bool:
    """Whether a module is the user's own. One that no file and no importer has made is."""
    file = module.__dict__.get("__file__")
    if str(module.__dict__.get("__name__")).partition(".")[0] == "monarch":  # it loads names when they are first used
        return False
    return module.__dict__.get("__spec__") is None if file is None else is_users_file(file) and not is_installed(file)
