"""What Python holds that a program can reach, noted before the program's own code can change it.

While a program is traced, each function of the user's that is entered has its closure, the globals that it names and
its arguments walked: instances and their classes, containers, functions, tensors. A `Held` keeps the contents that one
such object had. So the trace can be undone, what it has changed is known, and guards can expect what was there.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterable
from decimal import Decimal
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, ModuleType, WrapperDescriptorType
from typing import Any

from monarch.language.programs.classify import is_users_class, kind_of
from monarch.language.programs.containers import HAS_CLASS, Mapping, Own
from monarch.language.programs.held import PLAIN, Contents, Held
from monarch.language.programs.kinds import Class, Names, is_users_module, is_users_own_module
from monarch.language.programs.settings import DECIMAL, Set

MOST_HELD = 100_000
"""So many objects are looked at for one trace."""
_BY_ANY_NAME = (getattr, hasattr, setattr, delattr, vars, dir, pickle.dumps, pickle.dump, operator.eq, operator.ne)
_METHODS_BY_ANY_NAME = frozenset("__getattribute__ __getstate__ __reduce_ex__ __reduce__ __dir__".split())
"""Those of every object, where a program has one without naming it: `get = config.__getattribute__`."""
_FUNCTIONS = (BuiltinFunctionType, MethodWrapperType, WrapperDescriptorType, MethodDescriptorType)
MOST_PLAIN = 100
"""A list of a library's with more entries is taken for constant."""


class Snapshot:
    """The contents of all objects that a trace has met so far, as they were then."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.full = False
        self.computes = False
        """Whether the program has reached a function that reads attributes by names that no code shows."""
        self._named: set[tuple[int, int]] = set()
        self._modules: dict[int, ModuleType] = {}
        """The user's own modules that were met."""
        self._codes: list[tuple[str, ...]] = []
        """What each code that was entered names."""
        self._keep: list[Any] = []

    def visit(self, value: Any) -> None:
        """Note a value, and all that can be reached from it."""
        stack = [value]
        while stack:
            value = stack.pop()
            if type(value) in PLAIN or id(value) in self.held:
                continue
            kind = kind_of(value)
            if kind is Names:
                self._module(value)
            self.computes = self.computes or _reads_any_name(value)
            if kind is None or isinstance(kind, str) or kind is Names:
                if type(value) is Decimal or value is Decimal:
                    self.note(Set(DECIMAL))
                continue
            if len(self.held) >= MOST_HELD:
                self.full = True
                return
            held = self.held[id(value)] = kind(value)
            stack.extend(held.before[1])
            if issubclass(kind, (Mapping, Own)):
                stack.extend(key for key in held.before[0] if type(key) is not str)
            if kind in HAS_CLASS:
                stack.extend(base for base in type(value).__mro__ if is_users_class(base))
            elif kind is Class:
                stack.extend(base for base in (*value.__mro__, *type(value).__mro__) if is_users_class(base))

    def note(self, held: Held) -> None:
        """Note what is reached by no object."""
        self.held.setdefault(held.ident, held)

    def enter(self, names: tuple[str, ...]) -> None:
        """Note that the program runs code that uses these names: of the user's own modules it may read any of them."""
        self._codes.append(names)
        for module in [*self._modules.values()]:
            self.names(module, names, ())

    def _module(self, module: ModuleType) -> None:
        if id(module) not in self._modules and is_users_own_module(module):
            self._modules[id(module)] = module
            self.names(module, ("__getattr__",), ())
            for names in self._codes:
                self.names(module, names, ())

    def compute(self) -> None:
        """Note all names of the user's own modules, for code that computes the names that it reads."""
        for module in [*self._modules.values()]:
            self.names(module, [*vars(module)], ())

    def names(self, holder: Any, names: Iterable[str], inner: tuple[str, ...]) -> None:
        """Note names of a module or of globals, and of modules among their values the `inner` names. Of globals and
        the user's own modules, names that are not there are noted too."""
        held = self.held.setdefault((new := Names(holder)).ident, new)
        assert isinstance(held, Names)
        entries = vars(holder) if isinstance(holder, ModuleType) else holder
        own = not isinstance(holder, ModuleType) or id(holder) in self._modules
        for name in names:
            if name not in entries:
                if own or (type(holder) is not ModuleType and hasattr(holder, name)):
                    held.note(name)
                continue
            held.note(name)
            value = entries[name]
            if isinstance(value, ModuleType):
                self._module(value)
                if id(value) not in self._modules and (id(value), id(inner)) not in self._named:
                    self._named.add((id(value), id(inner)))
                    self._keep.append(inner)
                    self.names(value, inner, inner)
            elif own or is_users_module(holder) or name == "environ" or _holds_plain(value) or _reads_any_name(value):
                self.visit(value)

    def restore(self) -> None:
        """Put everything back to what it was."""
        for held in self.held.values():
            held.restore()

    def changes(self) -> list[tuple[Held, Contents]]:
        """The objects whose contents have changed, with their contents now."""
        found = []
        for held in self.held.values():
            now = held.changed()
            if now is not None:
                found.append((held, now))
        return found


def _reads_any_name(value: Any) -> bool:
    """Whether it is a function of C's that reads attributes by names that no code shows."""
    if type(value) not in _FUNCTIONS:
        return False
    formats = isinstance(getattr(value, "__self__", None), str)  # `show = "{0.rate}".format`
    return formats or value in _BY_ANY_NAME or value.__name__ in _METHODS_BY_ANY_NAME


def _holds_plain(value: Any) -> bool:
    """Whether it is a list of plain values, such as `sys.argv`."""
    return type(value) is list and len(value) <= MOST_PLAIN and all(type(entry) in PLAIN for entry in value)
