"""The kinds of Python objects that a program can reach, beside instances and containers: functions, classes, modules,
tensors, arrays, loggers, and what consists of parts."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Iterable
from types import MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from monarch.language.programs.held import MISSING, Attributes, Contents, Held, same_entries
from monarch.language.source import is_installed, is_users_file
from monarch.language.tensors.plain import LARGE
from monarch.language.tensors.tensor import DistributedTensor

TOLD = "@__name__", "@__qualname__", "@__doc__", "@__module__"
"""What functions and classes say of themselves, as keys."""


def _told(holder: Any) -> list[Any]:
    texts = holder.__name__, holder.__qualname__, holder.__doc__, holder.__module__
    return [sys.intern(text) if type(text) is str else None for text in texts]  # some classes make theirs when asked


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
        types.BuiltinMethodType: ("__self__", "__name__"),
        types.MethodWrapperType: ("__self__", "__name__"),
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


class ProgramParts(Parts):
    """A program: its function, and the attributes that users give it as they would the function."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        own = {
            key: value
            for key, value in vars(holder).items()
            if key not in holder._own_attributes and not key.startswith("__")
        }
        return ["__wrapped__", *own], [holder.__wrapped__, *own.values()]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        Attributes.put(holder, key, value)

    def changed(self) -> Contents | None:
        return Held.changed(self)


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
    "__firstlineno__ __static_attributes__ __parameters__ __orig_bases__".split()
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
        return None if same_entries(self.before, (self.before[0], now)) else ([*self.before[0]], now)

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
            keys += _READ_ANEW
            address = _address(holder)
            values += [holder._version, address, holder.shape, _form(holder), _bytes(holder) if address else b""]
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
            if not value and not holder.is_leaf:  # it has been written in place
                if not holder._is_view():  # whose history is that of what it views
                    holder.detach_()
                return
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


_READ_ANEW = ("_version", "data_ptr", "shape", "form", "bytes")


def _form(tensor: torch.Tensor) -> str:
    """How a tensor reads its memory, which giving it a view of its own data (`w.data = w.data.t()`) changes alone."""
    return f"{tensor.dtype}{tensor.stride()}{tensor.is_conj()}{tensor.is_neg()}"


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
    """A numpy array without Python's objects, by its bytes."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        return ["dtype", "shape", "bytes"], [str(holder.dtype), holder.shape, holder.tobytes()]

    def changed(self) -> Contents | None:
        now = self.read(self.holder)
        return None if now == self.before else now

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        now = dict(zip(*cls.read(holder), strict=True)) | {key: value}
        cls.fill(holder, [*now], [*now.values()])

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        kind, shape, content = values
        if holder.flags.writeable and str(holder.dtype) == kind and len(content) == holder.nbytes:
            holder.shape = shape
            holder[...] = np.frombuffer(content, holder.dtype).reshape(shape)


class ByteBuffer(Array):
    """A `bytearray`, or an array of Python's module `array`."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        return ["bytes"], [bytes(holder)]

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        holder[:] = (
            type(holder)(values[0]) if isinstance(holder, bytearray) else array.array(holder.typecode, values[0])
        )


class MemoryFile(Array):
    """A file in memory (`io.StringIO`, `io.BytesIO`): what is in it, and where it stands."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        if holder.closed:
            return ["closed"], [True]
        return ["content", "place"], [holder.getvalue(), holder.tell()]

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        if holder.closed or keys == ["closed"]:
            return  # no method opens it again, and what was in it is lost
        content, place = values
        holder.seek(0)
        holder.truncate()
        holder.write(content)
        holder.seek(place)


class Logger(Held):
    """A logger: which levels it logs, to which handlers, and the attributes that users give it (with a dot before)."""

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
        found.update((f".{name}", value) for name, value in vars(holder).items() if name not in _OF_LOGGERS)
        several = [*holder.handlers, *holder.filters]
        return [*found, *range(len(several))], [*found.values(), *several]

    @classmethod
    def put(cls, holder: Any, key: Any, value: Any) -> None:
        if key == "level":
            holder.setLevel(value)
        elif key in ("disabled", "propagate"):
            setattr(holder, key, value)
        elif type(key) is str and key.startswith("."):
            Attributes.put(holder, key[1:], value)


_OF_LOGGERS = vars(logging.Logger("")).keys()


def is_users_module(module: ModuleType) -> bool:
    """Whether a module is the user's or an installed library's."""
    file = module.__dict__.get("__file__")
    return file is not None and is_users_file(file)


def is_users_own_module(module: ModuleType) -> bool:
    """Whether a module is the user's own. One that no file and no importer has made is."""
    file = module.__dict__.get("__file__")
    # Ours load names when they are first used, and `torch.ops` makes a module of each name that it is asked for.
    if str(module.__dict__.get("__name__")).partition(".")[0] in ("monarch", "torch"):
        return False
    return module.__dict__.get("__spec__") is None if file is None else is_users_file(file) and not is_installed(file)


def tensors_first(leaves: list[Any]) -> list[tuple[int, Any]]:
    """Results by their numbers: what is returned itself ends its history as a result does."""
    return sorted(enumerate(leaves), key=lambda each: not isinstance(each[1], torch.Tensor))
