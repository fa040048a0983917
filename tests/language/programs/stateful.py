"""Texts of small programs that read and write Python in every way, and of changes from outside; the worlds that they
make with plain tensors and with distributed ones."""

from __future__ import annotations

import array
import enum
import functools
import itertools
import linecache
import os
import re
import types
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from monarch.compiler.errors import MonarchError
from monarch.language import DistributedTensor, Mesh, distribute, module_to_mesh, program
from tests.language.alike import difference
from tests.language.programs.stateful_lines import INSIDE, OUTSIDE
from tests.language.programs.stateful_pieces import KINDS, MODULES, PIECES, PRELUDE, PROGRAM


@functools.cache
def code_of(source: str, name: str) -> types.CodeType:
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return compile(source, name, "exec", dont_inherit=True)


@functools.cache
def kinds() -> dict[str, Any]:
    """The classes that all worlds share."""
    names: dict[str, Any] = {"__name__": "stateful", "torch": torch}
    exec(code_of(KINDS, "<kinds>"), names)
    return names


class Text:
    """What a world is made of, and which attributes of `s` are named in it."""

    def __init__(self, body: list[str], changes: list[list[str]]) -> None:
        text = " ".join(itertools.chain(body, *changes))
        self.named = {"k", "x", "y", *re.findall(r"\bs\.(\w+)", text)} | set("ab" if "'ab'" in text else "")
        sources = {"<s>": PRELUDE}
        for word, source in PIECES.items():
            if word in text:
                sources[f"<{word}>"] = source
        for name, (source, *words) in MODULES.items():
            if any(word in text for word in words):
                sources[f"<{name}>"] = source
        self.codes = [code_of(source, name) for name, source in sources.items()]
        lines = [
            f"        {line}\n        if s.fail is {number}: raise KeyError" for number, line in enumerate(body, 1)
        ]
        self.codes.append(code_of.__wrapped__(PROGRAM % "\n".join(lines), "<program>"))


class World:
    """The module that the source makes, with plain tensors or distributed ones, and its program."""

    def __init__(self, text: Text, make: Callable[..., Any], place: Callable[..., Any], wrap: Any) -> None:
        self.names = {**kinds(), "make": make, "place": place, "program": wrap}
        torch.default_generator.manual_seed(0)
        for code in text.codes:
            exec(code, self.names)

    def step(self, x: torch.Tensor) -> Any:
        result = self.names["step"](x)
        self.names["given"], self.names["last"] = x, result
        return result

    def change(self, line: str, seed: int) -> Exception | None:
        """Run a line from outside. Gives the error that it raises."""
        torch.default_generator.manual_seed(seed)
        try:
            exec(line, self.names)
        except Exception as error:
            return error
        return None

    def state(self, attributes: Collection[str]) -> Any:
        """All that its program may have changed; of `s` these attributes."""
        names = self.names
        found = [seen(names[key]) for key in STATE if key in names]
        own = {key: value for key, value in vars(names["s"]).items() if key in attributes}
        left = [own, names["S"].count, names["look"]()]
        if registry := names.get("registry"):
            left += [dict(registry), vars(registry)]
        if lazy := names.get("Lazy"):
            left.append(lazy.shared)
        return [found, seen(left)]

    def close(self) -> None:
        """Take it apart: the garbage collector has nothing to find."""
        self.names.clear()


STATE = "G GT last given net opt net2 opt2 keep record deep dopt CV by_default trainer trainer2 watched Dies".split()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def seen(value: Any) -> Any:
    """All that can be reached from a value, as plain data."""
    if isinstance(value, torch.Tensor):
        flags = str(value.requires_grad), str(value.is_leaf)
        if isinstance(value, DistributedTensor) and value._ref.parent is None and not value._ref.cell.mesh.pending:
            cell = value._ref.cell  # what `tolist` gives, without taking it apart into shards
            value = getattr(cell.handle, "tensor", value)
        return [
            str(value.dtype),
            *flags,
            *map(_rounded, value.detach().flatten().tolist()),
        ]
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        tensors += [(f"{name}.grad", parameter.grad) for name, parameter in value.named_parameters()]
        flags = [(module.training, *(len(vars(module)[kind]) for kind in _HOOKS)) for module in value.modules()]
        return [flags, *((name, tensor is not None and tensor.requires_grad, seen(tensor)) for name, tensor in tensors)]
    if isinstance(value, torch.optim.Optimizer):
        states = [sorted((k, seen(v)) for k, v in entry.items()) for entry in value.state.values()]
        return [states, [{k: seen(v) for k, v in group.items() if k != "params"} for group in value.param_groups]]
    if isinstance(value, dict):
        return type(value).__name__, [(key, seen(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set, deque, array.array)):
        return [type(value).__name__, [seen(entry) for entry in value]]
    if isinstance(value, types.FunctionType):
        cells = [seen(cell.cell_contents) for cell in value.__closure__ or ()]
        return [value.__name__, cells, seen(value.__defaults__ or ())]
    if isinstance(value, type):
        return [seen(entry) for name, entry in vars(value).items() if name == "count"]
    if isinstance(value, (ChainMap, ContextVar)):
        return seen(value.maps if isinstance(value, ChainMap) else value.get())
    if isinstance(value, float):
        return ("float", float(f"{value:.4g}"), str(value)[0] == "-")
    if isinstance(value, (int, str, bytes, bytearray, type(None), enum.Enum)):
        return (type(value).__name__, str(value))
    if type(value).__name__ in ("Record", "Slotted"):
        return [seen(getattr(value, name, None)) for name in type(value).__slots__ if name != "__weakref__"]
    if type(value).__name__ in ("S", "Other", "Plain", "Lazy", "SimpleNamespace", "Trainer", "Watched"):
        kept = {key: entry for key, entry in vars(value).items() if key not in ("apply", "member", "cached")}
        return type(value).__name__, seen(kept)
    return type(value).__name__


ARGUMENTS: dict[str, Callable[[dict[str, Any], float], torch.Tensor]] = {
    "plain": lambda world, value: torch.full((3,), value),
    "strided": lambda world, value: torch.full((6,), value)[::2],
    "double": lambda world, value: torch.full((3,), value, dtype=torch.float64),
    "leaf": lambda world, value: torch.full((3,), value).requires_grad_(),
    "placed": lambda world, value: world["make"](value),
    "placed leaf": lambda world, value: world["make"](value).requires_grad_(),
    "view": lambda world, value: world["make"](value).repeat(2)[::2],
    "computed": lambda world, value: world["make"](value).requires_grad_() * 2,
    "state": lambda world, value: world["s"].a,
    "global": lambda world, value: world["x0"],
}
"""What makes the argument of a call."""

REFUSED = re.compile(
    "a program left this tensor .* with the history|changes a tensor's shape in place|cannot set the data of"
    "|cannot write in place to an expanded tensor|argument .* a plain tensor.* is changed in place"
    "|is given a gradient, and is|cannot branch on a tensor's value"
    "|argument .* of the program is a plain tensor|a plain tensor of shape .* is changed in place"
)
"""What a program may be refused for."""


def _rounded(entry: Any) -> float:
    """A number without what is left of a sum that would be zero."""
    return float(f"{float(entry):.3g}") if abs(entry) > 1e-5 else 0.0


def compare(body: list[str], changes: list[list[str]], given: Sequence[str], mesh: Mesh) -> None:
    """Run the calls of two worlds, each after changes from outside, with arguments of these kinds, again and again."""
    os.environ.pop("MONARCH_STATEFUL", None)
    if any("next(s." in line or "Dies" in line for line in body):  # neither an iterator nor a death can be taken back
        changes = [[line for line in lines if "s.fail" not in line] for lines in changes]
    text = Text(body, changes)
    plain = lambda value: torch.full((3,), value)  # noqa: E731
    theirs = World(text, plain, lambda module: module, lambda function: function)
    ours = World(
        text,
        lambda value: distribute(plain(value), mesh),
        lambda module: module_to_mesh(module, mesh),
        lambda function: program(function, mesh=mesh),
    )
    try:
        for number, lines in enumerate(changes):
            named = text.named if number < len(changes) - 1 else [*vars(ours.names["s"])]
            make = ARGUMENTS[given[number % len(given)]]
            if not _alike(number, lines, make, named, theirs, ours):
                break
    except AssertionError as error:
        raise AssertionError(f"{error}\nin call {number} of {body} with {changes} and {given}") from None
    finally:
        theirs.close()
        ours.close()


def _alike(number: int, lines: list[str], make: Any, named: Collection[str], theirs: World, ours: World) -> bool:
    """One call. Whether another one may follow."""
    for line in lines:
        failed, expected = ours.change(line, number), theirs.change(line, number)
        if failed is not None and not _is_refused(failed):
            _same(type(failed).__name__, type(expected).__name__, f"{failed!r} raised by {line}")
        if failed is not None or expected is not None:
            return False
    argument, own = make(theirs.names, 0.25 * number), make(ours.names, 0.25 * number)
    try:
        result = ours.step(own)
    except Exception as error:  # the state is that before the call
        if _is_refused(error):
            return False
        _same(ours.state(named), theirs.state(named), f"state after {error!r}")
        _same(seen(own), seen(argument), f"argument after {error!r}")
        try:
            theirs.step(argument)
        except Exception as other:
            if isinstance(error, type(other)):
                return False  # some of its changes were made
            raise AssertionError(f"raises {error!r} for {other!r}") from error
        raise AssertionError(f"raises {error!r}") from error
    _same(seen(result), seen(theirs.step(argument)), "result")
    _same(seen(own), seen(argument), "argument")
    _same(ours.state(named), theirs.state(named), "state")
    return True


def _is_refused(error: Exception) -> bool:
    return isinstance(error, MonarchError) and REFUSED.search(str(error)) is not None


def _same(ours: Any, theirs: Any, what: str) -> None:
    if ours != theirs and (told := difference(ours, theirs, what)):  # no number is equal to NaN
        raise AssertionError(told)


BODIES = st.lists(st.sampled_from(INSIDE), min_size=1, max_size=4)
CHANGES = st.lists(st.lists(st.sampled_from(OUTSIDE), max_size=2), min_size=2, max_size=4)
GIVEN = st.lists(st.sampled_from([*ARGUMENTS]), min_size=1, max_size=2)
