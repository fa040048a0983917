"""Which kind of object a value is: how its contents are held, or that it has none that can change."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import functools
import inspect
import io
import logging
import sys
import threading
import types
import weakref
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch

from monarch.language.programs.containers import CONTAINERS, Own
from monarch.language.programs.held import PLAIN, Attributes, Held, Slots, has_dict, is_program, slots_of
from monarch.language.programs.kinds import (
    Array,
    ByteBuffer,
    Class,
    Function,
    Logger,
    MemoryFile,
    Names,
    Parts,
    ProgramParts,
    Tensor,
    Variable,
)
from monarch.language.recorder.scalar_int import ScalarInt

MOST_ENTRIES = 10_000
"""A container with more entries is not looked through."""
HEAP = 1 << 9
"""The flag of classes that Python code has made."""


CONSTANT, OPAQUE = "constant", "opaque"
"""Other kinds: objects that a program cannot see change, and objects of which we cannot know whether they do."""

_CONSTANT_MODULES = (
    *("torch._ops", "torch._C", "torch.fx", "torch._subclasses", "torch.library", "torch._higher_order_ops"),
    *("logging", "_thread", "re", "typing", "abc", "warnings"),
    *("monarch.language", "monarch.compiler", "monarch.runtime"),
    *("inspect", "importlib", "_frozen_importlib", "_frozen_importlib_external"),
    *("datetime", "decimal", "fractions", "uuid", "torch.autograd.function", "dataclasses"),
)
_MADE_OF_PARTS = (*(kind for kind in Parts.names if kind is not types.BuiltinMethodType), weakref.ref)


def kind_of(value: Any) -> type[Held] | str | None:
    """How a value is held: None for plain values."""
    kind: Any = type(value)
    if kind in PLAIN:
        return None
    if issubclass(kind, torch.Tensor):
        return Tensor
    for container, held in CONTAINERS:
        if issubclass(kind, container):  # an object may say of itself that it is another's, as weak proxies do
            if len(cast("Any", value)) > MOST_ENTRIES:
                return OPAQUE
            own = has_dict(kind) and (kind is not collections.OrderedDict or bool(value.__dict__))
            return Own if own else held
    if kind is FunctionType:
        return Function
    if isinstance(value, _MADE_OF_PARTS):
        return Parts
    if is_program(kind):
        return ProgramParts
    if kind is functools._lru_cache_wrapper or kind is types.MappingProxyType:
        return Parts
    if kind is types.GeneratorType and inspect.getgeneratorstate(value) == inspect.GEN_CREATED:
        return CONSTANT  # the program has not run it: a context manager that decorates a function keeps one
    if kind is contextvars.ContextVar:
        return Variable
    if isinstance(value, ModuleType):
        return Names
    if isinstance(value, type):
        return Class if is_users_class(value) else CONSTANT
    if isinstance(value, logging.Logger):
        return Logger
    if kind in (bytearray, array.array):
        return ByteBuffer
    if kind in (io.StringIO, io.BytesIO):
        return MemoryFile
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return OPAQUE  # its bytes are addresses
    if isinstance(value, types.BuiltinFunctionType):
        of = value.__self__  # of a function that pybind11 has made, its own record
        is_function = of is None or isinstance(of, (ModuleType, type)) or type(of).__module__ == "pybind11_builtins"
        return CONSTANT if is_function else Parts
    return _kind_of_instance(kind)


def _is_of(kind: type, module: str) -> bool:
    """Whether a class is of the module, or at least the library, of which it says that it is. A class of the user's may
    say anything."""
    found: Any = sys.modules.get(module)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is kind:
        return True
    root = module.partition(".")[0]
    names = [str(each.__globals__.get("__name__")) for each in vars(kind).values() if type(each) is FunctionType]
    return any(name.partition(".")[0] == root for name in names) if names else "__dict__" not in vars(kind)


@functools.cache
def _kind_of_instance(kind: Any) -> type[Held] | str:
    module = kind.__module__ or ""
    if kind is object:  # a sentinel
        return CONSTANT
    if isinstance(kind, type) and issubclass(kind, _CONSTANT_TYPES):
        return CONSTANT
    if issubclass(kind, (torch.fx.Graph, torch.fx.Node)):  # in part of C, and made to be rewritten
        return OPAQUE
    if kind is dataclasses.Field:  # with the metadata that a program may read
        return Slots
    if (
        kind.__name__ not in ("_local", "Generator")
        and not issubclass(kind, torch.nn.Module)
        and any(
            (module == name or module.startswith(name + ".")) and _is_of(kind, module) for name in _CONSTANT_MODULES
        )
    ):
        return CONSTANT
    if kind in (np.ndarray, np.memmap, np.recarray, np.matrix):
        return Array
    if issubclass(kind, np.void) or _hides(kind):
        return OPAQUE
    if module == "numpy" and kind.__name__ not in _CHANGING and not (has_dict(kind) and kind.__flags__ & HEAP):
        return CONSTANT  # scalars, dtypes and functions
    if slots_of(kind):
        return Slots
    if (
        module in ("random", "io", "_io")
        or issubclass(kind, (threading.Thread, torch.Generator))
        or kind.__name__ == "_local"
        or not kind.__flags__ & HEAP
        and kind is not types.SimpleNamespace
    ):
        return OPAQUE
    if has_dict(kind):
        return Attributes
    return CONSTANT if kind.__basicsize__ == object.__basicsize__ else OPAQUE  # an `object` with nothing in it


_CHANGING = ("Generator", "flatiter", "nditer", "broadcast")
"""NumPy's objects that are another at each use."""
_VALUES = (int, float, complex, str, bytes)
_POINTER = ctypes.sizeof(ctypes.c_void_p)


def _hides(kind: Any) -> bool:
    """Whether an instance of a Python class has room for more than Python shows: what a base in C keeps there."""
    if not kind.__flags__ & HEAP or issubclass(kind, _VALUES):
        return False
    shown = len(slots_of(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return bool(kind.__basicsize__ > object.__basicsize__ + _POINTER * shown)


_Entry = collections.namedtuple("_Entry", "value")
_CONSTANT_TYPES: tuple[type, ...] = (
    *(torch.SymInt, torch.SymFloat, torch.SymBool, ScalarInt, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.GenericAlias, types.UnionType),
    type(_Entry.value),
)


_ABSTRACT = ("typing", "abc", "_collections_abc")


def is_made_of_python(value: Any) -> bool:
    """Whether all of an object can be seen: its class is one of the user's, and it is made of attributes and slots
    alone, or those and the entries of a dict or a list; or it is a namespace."""
    kind: Any = type(value)
    return _is_made_of_python(kind)


@functools.cache
def _is_made_of_python(kind: Any) -> bool:
    if kind is types.SimpleNamespace:
        return True
    held = _kind_of_instance(kind) if not issubclass(kind, (dict, list)) else Own if has_dict(kind) else None
    bases = [base for base in kind.__mro__ if not is_users_class(base) and base.__module__ not in _ABSTRACT]
    return held in (Attributes, Slots, Own) and set(bases) <= {object, dict, list, collections.OrderedDict}


@functools.cache
def is_users_class(kind: Any) -> bool:
    root = str(kind.__module__).partition(".")[0]  # C code may have put anything there
    libraries = "builtins", "torch", "monarch", "typing", "collections", "abc", "enum", "numpy"
    if issubclass(kind, torch.fx.GraphModule) and kind is not torch.fx.GraphModule:
        return True  # one for each graph, and its `forward` is another when that is compiled again
    return bool(kind.__flags__ & HEAP) and not (root in libraries and _is_of(kind, str(kind.__module__)))
