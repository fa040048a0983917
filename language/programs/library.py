"""PyTorch's own functions that a trace enters: users replace them (`nn.Linear.forward = ...`, `F.linear = ...`,
`torch.Tensor.relu = ...`), and a program follows, as the same code does without it."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Iterable, Mapping
from itertools import chain
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from monarch.language.programs.identity import addresses

_PATCHED = ("torch.nn.", "torch.optim.", "torch._tensor", "torch.functional")
"""The modules whose functions users replace."""


class Library:
    """Which functions and hooks stood in PyTorch's modules and classes, and which bases the user's classes had."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[Any, Mapping[str, Any], dict[str, Any]]] = {}
        """By the id of the namespace or class that has them: that, its entries, and the functions there."""
        self._reads: list[tuple[operator.itemgetter[Any], Mapping[str, Any]]] = []
        self._there = b""
        """When all functions are noted, what reads them again, and the addresses of them and of the hooks."""
        self._changed = False
        self._classes: dict[type, int] = {torch.Tensor: len(vars(torch.Tensor))}
        """Classes with the number of their attributes: one that got another overrides an inherited one."""
        self._bases: dict[type, tuple[type, ...]] = {}
        self._hooks = (*chain.from_iterable(_HOOKS),)
        self.names(_OPERATORS)  # code does not name the methods of its operators

    def enter(self, code: CodeType, module: dict[str, Any]) -> None:
        """Note a function of PyTorch's that is entered, where its module or class has it, and those of
        `torch.nn.functional` that it names."""
        if not str(module.get("__name__")).startswith(_PATCHED):
            return
        for name in code.co_names:
            if name in F.__dict__:
                self._note(F.__dict__, F.__dict__, name)
        *outer, name = code.co_qualname.split(".")
        if len(outer) == 1 and isinstance(owner := module.get(outer[0]), type):
            for key, value in vars(owner).items():  # a method may have several names
                if getattr(value, "__code__", None) is code:
                    self._note(owner, vars(owner), key)
        elif not outer and getattr(module.get(name), "__code__", None) is code:
            self._note(module, module, name)

    def names(self, names: Iterable[str]) -> None:
        """Note the methods of tensors that the user's code may name."""
        for name in names:
            if name in vars(torch.Tensor):
                self._note(torch.Tensor, vars(torch.Tensor), name)

    def classes(self, kinds: set[type]) -> None:
        """Note, when all functions are, the classes whose instances, or which themselves, a program reaches: their
        bases, and the methods of PyTorch's modules and optimizers."""
        for base in {base for kind in kinds for base in kind.__mro__}:
            if not str(base.__module__).startswith(_PATCHED):
                self._bases[base] = base.__bases__
            elif base not in self._classes:
                self._classes[base] = len(vars(base))
                for name, value in vars(base).items() if base not in _BASES else ():
                    if callable(value):
                        self._note(base, vars(base), name)
        expected: list[Any] = []
        self._reads = []
        for _, entries, known in self._functions.values():
            names = [*known, next(iter(known))]  # of two and more names a getter gives a tuple
            self._reads.append((operator.itemgetter(*names), entries))
            expected += [known[name] for name in names]
        self._there = addresses((*expected, *self._hooks))

    def _note(self, owner: Any, entries: Mapping[str, Any], name: str) -> None:
        _, _, known = self._functions.setdefault(id(owner), (owner, entries, {}))
        self._changed = self._changed or known.setdefault(name, entries[name]) is not entries[name]

    def _found(self) -> tuple[Any, ...]:
        functions = chain.from_iterable([read(entries) for read, entries in self._reads])
        return (*functions, *chain.from_iterable(_HOOKS))

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            found = self._found()
        except KeyError:
            return False
        return (
            not self._changed
            and addresses(found) == self._there  # `==` would ask what somebody has put there
            and [*map(len, map(vars, self._classes))] == [*self._classes.values()]
            and (not self._bases or [*map(_bases_of, self._bases)] == [*self._bases.values()])
        )


copyreg._slotnames(torch.Tensor)  # type: ignore[attr-defined]  # the first copy of a tensor leaves them in its class
_OPERATORS = [name for name in dir(torch.Tensor) if name.startswith("__") and callable(getattr(torch.Tensor, name))]

_bases_of = operator.attrgetter("__bases__")

_BASES = (torch.nn.Module, torch.optim.Optimizer)
_HOOKS: list[Iterable[Any]] = [
    value.values()  # which shows what is there later too
    for module in (torch_module, torch_optimizer)
    for name, value in vars(module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]
"""The hooks that every module and optimizer calls."""
