"""By which names a trace may have read or set attributes of an object of the user's own.

A name that code uses may be that of any object's attribute. Of an object whose class is the user's alone more is known:
`self.optimizer.step()` asks what is called `optimizer` for its `step`, and no other object; and what PyTorch's code
names, it reads of objects that it has been given. So a count that a trainer keeps in `self.step` may go on between two
calls.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from monarch.language.programs.classify import is_made_of_python, is_users_class, kind_of
from monarch.language.programs.containers import Attribute
from monarch.language.programs.held import MISSING, PLAIN, Attributes, Held, Slots
from monarch.language.programs.kinds import Class, Function, Names, Parts, Tensor
from monarch.language.source import is_users_file

_BY_HAND = frozenset("__setattr__ __delattr__ __get__ __set__ __delete__".split())
"""Code that names one of these may set an attribute, or read one, that it names nowhere."""
_SETS = ("STORE_ATTR", "DELETE_ATTR")
_OF_C = frozenset(("func", "value", "args", "keywords"))
"""Attributes by which C code, and members of enums, have the objects that they were given."""
_READ, _SET = ("getattr", "hasattr"), ("setattr", "delattr")
OF_A_NAME = *_READ, *_SET
"""Builtins whose calls are looked at: most show the name."""
_STORES = (*_SETS, "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME")
FORWARDS = frozenset("contextlib functools torch.utils._contextlib torch._dynamo.eval_frame".split())
"""Modules whose functions only hand on what they are given, to functions that they call."""


@dataclass(frozen=True)
class Asked:
    """The attributes that one code reads or sets: of any object, and of what is called `owner`."""

    free: frozenset[str] = frozenset()
    of: frozenset[tuple[str, str]] = frozenset()
    """Pairs of an owner, which is a global or an attribute, and the name of its attribute."""
    stores: frozenset[str] = frozenset()
    """The globals and attributes to which it may give another value, also by a keyword (`SimpleNamespace(best=x)`)."""
    by_hand: bool = False
    """Whether it may set an attribute by a name that it does not show."""
    spreads: bool = False
    """Whether it calls something with the entries of a dict, which makes them attributes of a namespace."""
    passed: frozenset[str] = frozenset()
    """The globals that it reads other than for an attribute."""

    def of_global(self, name: str) -> frozenset[str] | None:
        """The attributes of a global that it may name, and attributes of these; None where it may be any name."""
        found = {name}
        while more := {attribute for owner, attribute in self.of if owner in found} - found:
            found |= more
        any_name = found & self.passed or any(owner.startswith("__") for owner in found)
        return None if any_name else frozenset(found)


def asked(steps: Sequence[dis.Instruction], texts: Sequence[str], names: Sequence[str]) -> Asked:
    """What a code of these instructions, texts and names asks for."""
    free, of = {text for text in texts if text.isidentifier()}, set()
    stores = {*free}
    ends = ("_ATTR", "_METHOD")
    passed = {
        str(step.argval)
        for step, after in zip(steps, [*steps[1:], None], strict=True)
        if step.opname == "LOAD_GLOBAL" and (after is None or not after.opname.endswith(ends) or after.is_jump_target)
    }
    for before, step in zip([None, *steps], steps, strict=False):
        if step.opname in _STORES:
            stores.add(str(step.argval))
        if not step.opname.endswith(ends):
            continue
        name = str(step.argval)
        plainly = before is not None and before.opname in ("LOAD_ATTR", "LOAD_GLOBAL") and not step.is_jump_target
        if before is None or not plainly or str(before.argval).startswith("__"):
            free.add(name)
        else:
            of.add((str(before.argval), name))
    by_hand = not _BY_HAND.isdisjoint(names) or computes_name(steps, _SET)
    spreads = any(step.opname == "CALL_FUNCTION_EX" and step.arg == 1 for step in steps)
    return Asked(frozenset(free), frozenset(of), frozenset(stores), by_hand, spreads, frozenset(passed))


def computes_name(steps: Sequence[dis.Instruction], functions: tuple[str, ...] = _READ) -> bool:
    """Whether one of these functions is called, or passed on, with a name that is no constant of the code."""
    for at, step in enumerate(steps):
        if not step.opname.startswith("LOAD_") or step.argval not in functions:
            continue
        call = next((i for i in range(at, len(steps)) if _closes(steps, at, i)), None)
        if call is None:
            return True
    return False


def _closes(steps: Sequence[dis.Instruction], start: int, at: int) -> bool:
    """Whether the step pushes all of the second operand of the call that starts at `start`, a constant."""
    step = steps[at]
    if step.opname != "LOAD_CONST" or not isinstance(step.argval, str):
        return False
    depth = 0
    for earlier in steps[start + 1 : at]:
        if "JUMP" in earlier.opname or earlier.opname in ("RETURN_VALUE", "FOR_ITER"):
            return False
        depth += dis.stack_effect(earlier.opcode, earlier.arg)
        if depth <= 0:
            return False
    if depth != 1:
        return False
    depth = 2
    for later in steps[at + 1 :]:
        if later.opname == "CALL" and depth == later.arg:
            return True
        if later.opname == "PRECALL":
            continue
        depth += dis.stack_effect(later.opcode, later.arg)
        if depth < 3 or "JUMP" in later.opname:  # it takes the constant
            return False
    return False


class Reads:
    """What the functions that a trace enters ask objects for."""

    def __init__(self) -> None:
        self._free: set[str] = set()
        self._of: dict[str, set[str]] = {}
        self._stores: set[str] = set()
        self._library: set[str] = set()
        self._by_hand = self._spreads = False
        self._given: set[int] = set()
        """The user's own objects, by id, that functions of libraries were given."""

    def enter(self, code: Asked) -> None:
        """Note a function of the user's."""
        self._free |= code.free
        self._stores |= code.stores
        self._by_hand = self._by_hand or code.by_hand
        self._spreads = self._spreads or code.spreads
        for owner, name in code.of:
            self._of.setdefault(owner, set()).add(name)

    def by_position(self, names: Sequence[str]) -> None:
        """Note attributes that are read of any object, by names that no code shows."""
        self._free.update(names)

    def of_library(self, names: Sequence[str]) -> None:
        """Note the names in a function of a library's."""
        self._library.update(names)

    def give(self, frame: FrameType) -> None:
        """Note what a library's function is given by code of the user's."""
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        values = frame.f_locals
        rest = [values.get(name) for name in code.co_varnames[:count]]
        seen: set[int] = set()
        while rest:  # which keeps none of them alive
            value = rest.pop()
            if id(value) in seen or not (isinstance(value, _CONTAINERS) or _is_users(value)):
                continue
            seen.add(id(value))
            kind = kind_of(value)
            if isinstance(kind, type):
                rest += [each for part in kind.read(value) for each in part if type(each) not in PLAIN]
        self._given |= seen

    def within(self, held: Mapping[int, Held]) -> Known:
        """What follows for the objects that the trace has met."""
        called: dict[int, set[str]] = {}
        computed, by_hand = {*_OF_C}, self._by_hand
        for each in held.values():
            for key, value in zip(*each.before, strict=True):
                name = key.name if type(key) is Attribute else key
                if type(name) is str and type(value) not in PLAIN:
                    called.setdefault(id(value), set()).add(name.removeprefix("."))  # one of a function's attributes
            by_hand = by_hand or (self._spreads and any(value is SimpleNamespace for value in each.before[1]))
            if isinstance(each, Class):
                computed.update(key for key in each.before[0] if type(key) is str)
            elif isinstance(each, Names) and isinstance(each.holder, ModuleType) and "__getattr__" in vars(each.holder):
                computed.update(key for key, value in zip(*each.before, strict=True) if value is MISSING)
        free = set(self._free)
        for owner, names in self._of.items():
            if owner in computed or owner in self._stores or "__getattr__" in computed:
                free |= names
        return Known(free, self._of, called, self._library, None if by_hand else _reached(self._given, held))


@dataclass
class Known:
    """By which names attributes of the objects that a trace has met may have been read or set."""

    free: set[str]
    of: dict[str, set[str]]
    called: dict[int, set[str]]
    """Under which names each object was found."""
    library: set[str]
    reached: set[int] | None
    """The objects, by id, that libraries can have reached; None for all."""

    def names(self, held: Held) -> set[str] | None:
        """Those of an object; None where nothing but the names of all code says it."""
        holder = held.holder
        if self.reached is None or id(holder) in self.reached or not _is_users(holder):
            return None
        return self.free.union(*(self.of.get(owner, ()) for owner in self.called.get(id(holder), ())))


_CONTAINERS = (list, tuple, set, frozenset, dict, functools.partial)


def _is_users(value: Any) -> bool:
    """Whether the classes of an object are the user's alone, and it is made of Python."""
    kind: Any = type(value)
    return is_made_of_python(value) and _is_users_code(kind)


@functools.cache
def _is_users_code(kind: Any) -> bool:
    return all(_is_users_module(base.__module__) for base in kind.__mro__ if is_users_class(base))


def _is_users_module(name: Any) -> bool:
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    return file is None or is_users_file(file)


def _reached(given: set[int], held: Mapping[int, Held]) -> set[int]:
    """What libraries can have reached: from objects that they were given, and from instances of classes of theirs."""
    found: set[int] = set()
    rest: list[Any] = [held[ident].holder for ident in given if ident in held]
    for each in held.values():
        if isinstance(each, (Attributes, Slots, Tensor)) and not _is_users(each.holder):
            rest += each.before[1]
    while rest:
        value = rest.pop()
        met = None if type(value) in PLAIN or id(value) in found else held.get(id(value))
        if isinstance(met, (Function, Class, Names)) or met is None:
            continue
        if isinstance(met, Parts) and not isinstance(value, functools.partial):
            continue
        found.add(id(value))
        rest += met.before[1]
        rest += [key for key in met.before[0] if type(key) not in PLAIN]
    return found
