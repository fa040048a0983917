"""What guards ask of thousands of places alike, in one call of native code: instances, dicts, lists, tuples, tensors.
`checks` writes the rest in Python, and all of it until a C++ compiler has built this, or where there is none."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sysconfig
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import GetSetDescriptorType
from typing import Any

import torch

from monarch.compiler.errors import MonarchError
from monarch.compiler.loading import load
from monarch.language.programs import containers
from monarch.language.programs.held import Attributes, same_plain
from monarch.language.programs.kinds import ASKED, Tensor
from monarch.language.programs.nodes import MODULE, Key, Node
from monarch.language.tensors.tensor import DistributedTensor

Look = Callable[[tuple[Any, ...]], "tuple[Any, ...] | None"]
"""Of the objects from which it starts, the values that are kept; None where a place has another value."""

SAME, PLAIN, TYPED, EMPTY, KEPT, _TEXT, _DIRECT = 1, 2, 4, 8, 16, 32, 64
"""What is expected of a value: the object, or one that is plain and equal to it; its type; that it has no entries. And
that it is kept; that its key is text; and that it is a `_Property`."""
_ATTRIBUTES, _ENTRIES, _ITEMS = 1, 2, 3
"""Where places are found: in a `__dict__`, in any order; in a dict, in this order; in a list or tuple."""
_INSIDE: dict[tuple[Any, type], int] = {
    (containers.Mapping, dict): _ENTRIES,
    (containers.Defaulting, defaultdict): _ENTRIES,
    (containers.Sequence, list): _ITEMS,
    (containers.Sequence, tuple): _ITEMS,
    (Tensor, DistributedTensor): _ATTRIBUTES,
}
WORTH = 100
"""So many objects are worth a compiler's time."""


def can_look(node: Node) -> bool:
    """Whether native code can look into an object."""
    if node.kind is Attributes:
        return not node.is_ordered
    return (node.kind, node.type) in _INSIDE


def how(node: Node, position: int) -> tuple[int, int]:
    """What is expected at a place: how, and the object's or type's id."""
    special = node.special.get(position)
    if special is None and position in node.plain:
        return SAME | PLAIN, id(node.plain[position])
    if special is None:
        return SAME, node.ids[position]
    if special.__name__ == "_is_distributed":
        return TYPED, id(DistributedTensor)
    return 0, 0


def _has_plain_dict(kind: Any) -> bool:
    """Whether C may take an instance's `__dict__` without asking its class."""
    return kind.__getattribute__ in (object.__getattribute__, torch.Tensor.__getattribute__) and isinstance(
        inspect.getattr_static(kind, "__dict__", None), GetSetDescriptorType
    )


def asked_of(node: Node) -> list[int]:
    """Which of the places before those of its `__dict__` a tensor is asked for. It has no hooks where it needs no
    gradient, and a gradient then only by a user's own hand."""
    needs = len(node.keys) > len(ASKED) or bool(node.plain.get(0))
    asks = {0, ASKED.index("grad")} if node.reads_grad else {0}
    return [at for at in range(len(ASKED)) if needs or at in asks or at not in node.plain]


@dataclass
class Table:
    """What native code is told to look at, object by object."""

    keeps: int = 0
    """How many values are kept so far."""
    _rows: array[int] = field(default_factory=lambda: array("q"))
    _nodes: int = 0
    _alive: list[Any] = field(default_factory=list)

    def add(self, node: Node, start: int, expected: Mapping[int, tuple[int, int]]) -> list[int]:
        """Look into an object: the value kept under the number `start`, or ~ the number of one to start from. Of
        places, by position, what is `expected`. Gives the positions whose values are kept, in order."""
        inside = _ATTRIBUTES if node.kind is Attributes else _INSIDE[node.kind, node.type]
        first = {Tensor: len(ASKED), containers.Defaulting: 1}.get(node.kind, 0)
        asked = [*range(first)]
        length = len(node.keys) - first
        if node.kind is Attributes:
            length = node.length
        elif node.kind is Tensor:
            asked, length = asked_of(node), length + 1  # for `_ref`
        positions = [*asked, *range(first, len(node.keys))]
        others = [key for key in node.others if key not in MODULE]
        count = len(node.keys) - first + len(others)
        self._rows.extend((start, id(node.type), not _has_plain_dict(node.type), len(asked), inside, length, count))
        for at in positions:
            self._place(self._asked(node, at) if at < first else node.keys[at], *expected[at])
        for key in others:
            self._place(key, 0, 0)
        self._nodes += 1
        self._alive += [node.type, node.plain]
        kept = [at for at in positions if expected[at][0] & KEPT]
        self.keeps += len(kept)
        return kept

    def _asked(self, node: Node, position: int) -> Any:
        """The key of a place that is read as an attribute."""
        return "default_factory" if node.kind is containers.Defaulting else _property(ASKED[position])

    def _place(self, key: Any, what: int, ident: int) -> None:
        if type(key) is _Property:
            self._rows.extend((key.address, what | _DIRECT, ident))
        elif type(key) is Key:
            self._rows.extend((key.ident, what, ident))
        else:
            self._rows.extend((id(key), what | (_TEXT if type(key) is str else 0), ident))
            self._alive.append(key)

    def look(self) -> Look:
        """The call that looks at all of it."""
        call = _library().look
        name = "__dict__"
        rows = array("q", (self._nodes, self.keeps, id(name), id(same_plain))) + self._rows
        address, alive = rows.buffer_info()[0], (rows, name, self._alive)

        def look(start: tuple[Any, ...], alive: Any = alive) -> tuple[Any, ...] | None:
            found: tuple[Any, ...] | None = call(address, start)
            return found

        return look


# -- building ----------------------------------------------------------------------------------------------------------


def built() -> ctypes.CDLL | None:
    """The native code, if it is built by now."""
    future = begin()
    return future.result() if future.done() else None


def _library() -> ctypes.CDLL:
    found = built()
    assert found is not None, "native code is asked for before it is built"
    return found


@dataclass(frozen=True)
class _Property:
    """What reads a tensor's attribute in C, without looking for it in its classes first."""

    address: int


@functools.cache
def _property(name: str) -> _Property | str:
    """What reads an attribute of every distributed tensor: its name, where Python has a say in it."""
    base = torch._C.TensorBase
    if inspect.getattr_static(DistributedTensor, name) is not vars(base).get(name):
        return name
    address = _library().find(base, name.encode())
    return _Property(address) if address else name


@functools.cache
def begin() -> Future[ctypes.CDLL | None]:
    """Begin to build it, and go on: it takes a compiler a second, once on a host."""
    future: Future[ctypes.CDLL | None] = Future()
    threading.Thread(target=lambda: future.set_result(_build()), name="monarch-guards", daemon=True).start()
    return future


def _build() -> ctypes.CDLL | None:
    """The native code; None where it cannot be had, which is said unless there is just no compiler."""
    # Objects as the native code knows them: a count, then the type.
    if sysconfig.get_config_var("Py_GIL_DISABLED") or object.__basicsize__ != 2 * ctypes.sizeof(ctypes.c_void_p):
        return None
    kernels = load("monarch.compiler.kernels.cpp.build")
    compiler = kernels.find_compiler()
    if compiler is None:
        return None
    try:
        path = kernels.build(Path(__file__).with_suffix(".cpp").read_text(), compiler)
        found: ctypes.CDLL = kernels.load(path, ctypes.PyDLL)
    except (MonarchError, OSError) as error:
        kernels.say_once(
            f"the guards of programs are checked in Python, for their native part cannot be built.\n{error}"
        )
        return None
    found.look.argtypes, found.look.restype = (ctypes.c_void_p, ctypes.py_object), ctypes.py_object
    found.find.argtypes, found.find.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    return found
