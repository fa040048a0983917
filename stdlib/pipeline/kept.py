"""A model's state: its parameters and buffers, which change once a step and not once a microbatch.

A call that writes one is made once, for the whole batch. One that is assigned anew (`self.steps = self.steps + 1`) is
assigned by each microbatch, which finds what the step began with; so are its modules' other attributes, lists and dicts
among them (`self.calls += 1`, `self.losses.append(loss)`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from monarch.compiler.errors import ProgramError
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.tape import Value
from monarch.language.programs.growing import GrowingList
from monarch.language.recorder.recording import Recording
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor


def writes(func: Any, kwargs: Any) -> bool:
    """Whether a call writes its first argument in place."""
    name = getattr(func, "__name__", "")
    named = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    return named or bool(kwargs.get("inplace"))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a call writes, as far as its name and `out=` show."""
    found: list[Any] = []
    for each in (*(args[:1] if writes(func, kwargs) else ()), kwargs.get("out")):
        found += each if isinstance(each, (list, tuple)) else [each]
    return found


def takes_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is a normalisation by the batch's own statistics, or one that keeps a mean of them."""
    if func is F.batch_norm:
        return bool(kwargs.get("training", args[5] if len(args) > 5 else False))
    if func is F.instance_norm:
        keeps = kwargs.get("running_mean", args[1] if len(args) > 1 else None) is not None
        return keeps and bool(kwargs.get("use_input_stats", args[5] if len(args) > 5 else True))
    return False


Entries = dict[str, Any]
"""A module's parameters or buffers, by name."""
Own = dict[str, tuple[Any, Any]]
"""A module's other attributes, by name, each with a copy of its entries where it is a list, dict, set or deque."""


_OF_ANY = nn.Module().__dict__.keys() - {"training"}
"""The attributes in which a module has its parameters, hooks and the like."""


class Kept:
    """The parameters and buffers of a model, and its modules' other attributes, as a step finds them."""

    def __init__(self, model: nn.Module, with_rows: set[tuple[str, str]]) -> None:
        """`with_rows` are the attributes, by module and name, that steps leave with the rows of a microbatch."""
        self._modules = list(model.modules())
        self._own_before = self._own_after = [_own(module) for module in self._modules]
        self._with_rows = with_rows
        modules = dict(model.named_modules())
        left = {at: vars(modules[at[0]]).get(at[1]) for at in with_rows if at[0] in modules}
        self._left = {id(each._ref.cell): at for at, each in left.items() if isinstance(each, DistributedTensor)}
        """By its cell, the values that the step before has left so."""
        self._of = [
            (f"{name}." if name else "", entries)
            for name, module in model.named_modules()
            for entries in (module._parameters, module._buffers)
        ]
        self._before = self._after = [_held(entries) for _, entries in self._of]
        self._names = {
            id(ref.cell): prefix + key
            for (prefix, _), held in zip(self._of, self._before, strict=True)
            for key, (_, ref) in held.items()
            if ref is not None
        }
        """By their storages."""

    def is_written(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call writes one of them, or a view of one."""
        return any(
            isinstance(each, DistributedTensor) and id(each._ref.cell) in self._names
            for each in _written(func, args, kwargs)
        )

    def check(self, recording: Recording, since: int) -> ProgramError | None:
        """The error of the tape's ops from there on, if they write one of them."""
        changed = [
            value
            for op in recording.tape.ops[since:]
            if isinstance(op.func, torch._ops.OpOverload) and op.func._schema.is_mutable
            for name in memory_of(op.func).writes
            for value in _values(op.argument(name))
        ]
        if not changed:
            return None
        of = {known.value.root.index: self._names.get(cell) for cell, known in recording.states.items()}
        name = next(filter(None, (of.get(value.root.index) for value in changed)), None)
        if name is None:
            return None
        return ProgramError(
            f"the model changes its '{name}' inside of a function, in each microbatch",
            hint="values that a model keeps change once a step. Change it by a call of its own, for which all "
            "microbatches wait:\nself.steps.add_(1), or self.steps = self.steps + 1.",
            source=user_source(),
        )

    def check_read(self, operands: Sequence[DistributedTensor]) -> ProgramError | None:
        """The error of a call's operands, if one has the rows of a microbatch of the step before."""
        at = next((self._left[id(each._ref.cell)] for each in operands if id(each._ref.cell) in self._left), None)
        if at is None:
            return None
        return ProgramError(
            f"the model reads its '{'.'.join(filter(None, at))}': it has the rows of a microbatch of the step before",
            hint="pass them with the batch: a value of an earlier step is an argument, with all rows.",
            source=user_source(),
        )

    def begin(self) -> None:
        """Before a microbatch: the model has the state that the step began with."""
        self._put(self._before)
        self._put_own(self._own_before)

    def note(self, has_rows: Callable[[DistributedTensor], bool]) -> None:
        """Behind the first microbatch. Raises ProgramError where it has assigned what `has_rows`."""
        self._after = [_held(entries) for _, entries in self._of]
        self._own_after = [_own(module) for module in self._modules]
        for (path, _), before_, after_ in zip(self._of[::2], self._own_before, self._own_after, strict=True):
            for name, (value, _) in after_.items():
                new = isinstance(value, DistributedTensor) and value is not before_.get(name, (None, None))[0]
                if new and has_rows(value):
                    self._with_rows.add((path.removesuffix("."), name))
        for (prefix, _), before, after in zip(self._of, self._before, self._after, strict=True):
            for key, (tensor, ref) in after.items():
                if ref is not None and ref is not before.get(key, (None, None))[1] and has_rows(tensor):
                    raise ProgramError(
                        f"the model assigns the rows of a microbatch to its '{prefix}{key}'",
                        hint="after the step it would have some rows of the batch: return them as an output of the "
                        "model.",
                        source=user_source(),
                    )

    def end(self) -> None:
        """Behind the step: the model has the values that the first microbatch has assigned."""
        self._put(self._after)
        self._put_own(self._own_after)

    def _put(self, wanted: Sequence[Mapping[str, tuple[Any, Any]]]) -> None:
        for (_, entries), held in zip(self._of, wanted, strict=True):
            if entries.keys() != held.keys() or any(entries[key] is not tensor for key, (tensor, _) in held.items()):
                entries.clear()
                entries.update({key: tensor for key, (tensor, _) in held.items()})
            for tensor, ref in held.values():
                if ref is not None and tensor._ref is not ref:  # its data were assigned
                    tensor._ref = ref

    def _put_own(self, wanted: Sequence[Own]) -> None:
        for module, own in zip(self._modules, wanted, strict=True):
            attributes = module.__dict__
            for name in [name for name in attributes if name not in own and name not in _OF_ANY]:
                del attributes[name]
            for name, (value, entries) in own.items():
                if attributes.get(name, own) is not value:
                    attributes[name] = value
                if entries is not None and not _same(value, entries):
                    value.clear()
                    (value.update if isinstance(value, (dict, set)) else value.extend)(entries)


def _own(module: nn.Module) -> Own:
    return {name: (value, _entries(value)) for name, value in module.__dict__.items() if name not in _OF_ANY}


def _entries(value: Any) -> Any:
    # A GrowingList refuses to be copied, and the program is traced without one: microbatches append to it each.
    return value.copy() if type(value) in (list, dict, set, deque, GrowingList) else None


def _same(value: Any, entries: Any) -> bool:
    """Whether a container has these very entries, in this order."""
    flat = [
        list(chain.from_iterable(each.items())) if isinstance(each, dict) else list(each) for each in (value, entries)
    ]
    return len(flat[0]) == len(flat[1]) and all(map(is_, *flat))


def _held(entries: Entries) -> dict[str, tuple[Any, Any]]:
    """Each tensor with where it looks."""
    return {key: (each, each._ref if isinstance(each, DistributedTensor) else None) for key, each in entries.items()}


def _values(entry: Any) -> Sequence[Value]:
    if isinstance(entry, Value):
        return (entry,)
    return [each for each in entry if isinstance(each, Value)] if isinstance(entry, (list, tuple)) else ()
