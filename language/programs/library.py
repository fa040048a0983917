"""PyTorch's own functions that a trace enters: users replace them (`nn.Linear.forward = ...`, `F.linear = ...`,
`torch.Tensor.relu = ...`), and a program follows, as the same code does without it."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from monarch.language.programs.classify import HEAP, is_users_class
from monarch.language.programs.identity import addresses

_PATCHED = ("torch.nn.", "torch.optim.", "torch._tensor", "torch.functional")
"""The modules whose functions users replace."""


class Library:
    """Which functions and hooks stood in PyTorch's modules and classes, and which bases the user's classes had."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[Any, Mapping[str, Any], dict[str, Any]]] = {}
        """By the id of the namespace or class that has them: that, its entries, and the functions there."""
        self._read: Callable[[], tuple[Any, ...]] = tuple
        self._there = b""
        """When all functions are noted, what reads them and the hooks again, and their addresses."""
        self._changed = False
        self._classes: dict[type, int] = {torch.Tensor: len(vars(torch.Tensor))}
        """Classes with the number of their attributes: one that got another overrides an inherited one, or has what the
        program asked for in vain."""
        self._named: set[str] = set()
        """The names in the user's code."""
        self._entries: list[Mapping[str, Any]] = []
        self._lengths: list[int] = []
        """The attributes of these classes, and their numbers, when all are noted."""
        self._bases: dict[type, tuple[type, ...]] = {}
        self._hooks = {module: [[*hooks.values()] for hooks in known] for module, known in _HOOKS.items()}
        self._calls_hooks: set[int] = set()
        """The modules, as in `_HOOKS`, of which a function was entered."""
        # Code does not name the methods of its operators. Those that are in Python are entered when they are called.
        self.names([name for name in _OPERATORS if not _is_in_python(vars(torch.Tensor).get(name))])

    def enter(self, code: CodeType, module: dict[str, Any]) -> None:
        """Note a function of PyTorch's that is entered, where its module or class has it, and those of
        `torch.nn.functional` that it names; where it is of `torch.nn`, those of `torch` too."""
        if not str(module.get("__name__")).startswith(_PATCHED):
            return
        if id(module) in _HOOKS:
            self._calls_hooks.add(id(module))
        for name in code.co_names:
            if name in F.__dict__:
                self._note(F.__dict__, F.__dict__, name)
            if module["__name__"].startswith("torch.nn.") and name in _OPS:
                self._note(torch.__dict__, torch.__dict__, name)
        *outer, name = code.co_qualname.split(".")
        if module is vars(torch._tensor):  # what wraps some operators is one function for all
            self.names([each for each in _OPERATORS if getattr(vars(torch.Tensor).get(each), "__code__", None) is code])
        if len(outer) == 1 and isinstance(owner := module.get(outer[0]), type):
            for key, value in vars(owner).items():  # a method may have several names
                if getattr(value, "__code__", None) is code:
                    self._note(owner, vars(owner), key)
        elif not outer and getattr(module.get(name), "__code__", None) is code:
            self._note(module, module, name)

    def names(self, names: Iterable[str]) -> None:
        """Note names in the user's code: methods of tensors among them, and later attributes of classes."""
        names = [*names]
        self._named.update(names)
        for name in names:
            if name in vars(torch.Tensor):
                self._note(torch.Tensor, vars(torch.Tensor), name)

    def classes(self, kinds: set[type]) -> None:
        """Note, when all functions are, the classes whose instances, or which themselves, a program reaches: their
        bases, the methods of PyTorch's modules and optimizers, and what else libraries' classes have that the user's
        code names."""
        for base in {base for kind in kinds for base in kind.__mro__}:
            is_patched = str(base.__module__).startswith(_PATCHED)
            if not is_patched:
                self._bases[base] = base.__bases__
            if is_patched or (base.__flags__ & HEAP and not is_users_class(base)):
                self._classes.setdefault(base, len(vars(base)))
                for name, value in vars(base).items():
                    if name in self._named or (is_patched and base not in _BASES and callable(value)):
                        self._note(base, vars(base), name)
        for owner in (torch.Tensor, *_BASES):  # what was replaced is not entered as PyTorch's own
            for name, value in vars(owner).items():
                if _may_be_replaced(value):
                    self._note(owner, vars(owner), name)
        expected: list[Any] = []
        reads: list[Callable[[], Iterable[Any]]] = []
        for _, entries, known in self._functions.values():
            names = [*known, next(iter(known))]  # of two and more names a getter gives a tuple
            reads.append(partial(operator.itemgetter(*names), entries))
            expected += [known[name] for name in names]
        for module in self._calls_hooks:
            reads += [hooks.values for hooks in _HOOKS[module]]
            expected += chain.from_iterable(self._hooks[module])
        self._there = addresses((*expected,))
        if len(reads) == 1 and not self._calls_hooks:  # a getter, which gives a tuple
            self._read = reads[0]  # type: ignore[assignment]
        else:
            self._read = lambda: (*chain.from_iterable([read() for read in reads]),)
        self._entries, self._lengths = [*map(vars, self._classes)], [*self._classes.values()]

    def _note(self, owner: Any, entries: Mapping[str, Any], name: str) -> None:
        _, _, known = self._functions.setdefault(id(owner), (owner, entries, {}))
        self._changed = self._changed or known.setdefault(name, entries[name]) is not entries[name]

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            found = self._read()
        except KeyError:
            return False
        return (
            not self._changed
            and addresses(found) == self._there  # `==` would ask what somebody has put there
            and [*map(len, self._entries)] == self._lengths
            and (not self._bases or [*map(_bases_of, self._bases)] == [*self._bases.values()])
        )


copyreg._slotnames(torch.Tensor)  # type: ignore[attr-defined]  # the first copy of a tensor leaves them in its class
_OPERATORS = [name for name in dir(torch.Tensor) if name.startswith("__") and callable(getattr(torch.Tensor, name))]

_OPS = frozenset(
    name for name, value in vars(torch).items() if name[0] != "_" and callable(value) and not isinstance(value, type)
)
_bases_of = operator.attrgetter("__bases__")

_BASES = (torch.nn.Module, torch.optim.Optimizer)
_HOOKS: dict[int, list[dict[Any, Any]]] = {
    id(vars(module)): [
        value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)
    ]
    for module in (torch_module, torch_optimizer)
}
"""The hooks that every module and optimizer calls, by the id of the namespace of PyTorch's module that has and calls
them."""


def _may_be_replaced(value: Any) -> bool:
    """Whether somebody else than PyTorch may have put this function into one of its classes."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__")).partition(".")[0] != "torch"
    return callable(value) and not isinstance(value, type)


def _is_in_python(method: Any) -> bool:
    """Whether it is a function of PyTorch's own for tensors."""
    return isinstance(method, FunctionType) and method.__globals__ is vars(torch._tensor)
