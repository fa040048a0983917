"""Every public definition that a user meets has a docstring: what `monarch` and its public modules export, all of the
standard library, and their public methods. An override may leave its docstring to what it overrides.

The docstring says what a script can ask for: the errors that the definition's own code raises, the unit of a time or a
size in memory, and, in the reference's pages, something of the shapes of tensors. A method's may leave that to its
class's."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import monarch.stdlib
from monarch.compiler.errors import MonarchError

FACES = ["monarch", "monarch.actor", "monarch.distributed", "monarch.launch", "monarch.rdma", "monarch.spmd"]
FACES += ["monarch.telemetry", "monarch.testing.chaos"]
PAGES = Path(__file__).parents[2] / "docs/reference/api"
STDLIB = [module.name for module in pkgutil.walk_packages(monarch.stdlib.__path__, "monarch.stdlib.")]


def exported(module: ModuleType) -> Iterator[object]:
    """The classes and functions of ours that a module exports, or defines where it has no `__all__`."""
    names = getattr(module, "__all__", None)
    for name in names or [name for name in vars(module) if not name.startswith("_")]:
        found = getattr(module, name)
        home = getattr(found, "__module__", "")
        if (inspect.isclass(found) or inspect.isfunction(found)) and home.startswith("monarch."):
            if names is not None or home == module.__name__:
                yield found


def undocumented(definition: object) -> Iterator[str]:
    """The names of a class or function and its public methods that have no docstring."""
    name = f"{definition.__module__}.{definition.__qualname__}"  # type: ignore[attr-defined]
    # What `dataclass` writes where there is none begins with the call.
    if not definition.__doc__ or definition.__doc__.startswith(f"{definition.__name__}("):  # type: ignore[attr-defined]
        yield name
    if inspect.isclass(definition):
        for method in dir(definition):
            found = inspect.getattr_static(definition, method)
            found = getattr(found, "__func__", getattr(found, "fget", getattr(found, "func", found)))
            ours = inspect.isfunction(found) and found.__module__.startswith("monarch.")
            if ours and not method.startswith("_") and not inspect.getdoc(getattr(definition, method)):
                yield f"{name}.{method}"


MEASURES = re.compile(r"(?:.*_)?(timeout|interval|delay|patience|grace|period|waited|duration|memory|memory_limit)")
"""Parameters whose names say what is measured, and not in what: `seconds` and `least_bytes` need no more words."""
UNITS = re.compile(r"second|byte|\b[KMG]iB\b", re.IGNORECASE)
SHAPES = re.compile(
    r"shape|\bdims?\b|\bsizes?\b|\brows?\b|elements|scalar|\b(?:f32|i64|u8|bool)?\[|\(batch|parameters|gradients"
)


def code_of(definition: object) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """A function, or the public methods that a class itself defines and its `__init__`: name, function, docstring."""
    name = f"{definition.__module__}.{definition.__qualname__}"  # type: ignore[attr-defined]
    if inspect.isfunction(definition):
        yield name, inspect.unwrap(definition), inspect.getdoc(definition) or ""
    for method, found in list(vars(definition).items()) if inspect.isclass(definition) else ():
        found = getattr(found, "__func__", getattr(found, "fget", getattr(found, "func", found)))
        is_ours = inspect.isfunction(found) and Path(found.__code__.co_filename).exists()  # no dataclass's `__init__`
        if (
            is_ours
            and found.__module__ == definition.__module__
            and (method == "__init__" or not method.startswith("_"))
        ):
            own = found.__doc__ if method == "__init__" else inspect.getdoc(getattr(definition, method))
            yield f"{name}.{method}", inspect.unwrap(found), f"{own or ''}\n{inspect.getdoc(definition)}"


def raised(function: Callable[..., Any]) -> Iterator[type[Exception]]:
    """The classes of Monarch's errors, and ValueError and TypeError, that a function's own statements raise."""
    nodes: list[ast.AST] = [*tree_of(function).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found = function.__globals__.get(node.exc.func.id, getattr(builtins, node.exc.func.id, None))
            if inspect.isclass(found) and issubclass(found, (MonarchError, ValueError, TypeError)):
                yield found
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            nodes += ast.iter_child_nodes(node)


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef | ast.AsyncFunctionDef:
    found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef))
    return found


def unsaid(definition: object) -> Iterator[str]:
    """What docstrings leave out: the names of errors, and units."""
    for name, function, text in code_of(definition):
        for error in raised(function):
            bases = (base.__name__ for base in error.__mro__ if issubclass(base, MonarchError) or base is error)
            if not any(re.search(rf"\b{base}\b", text) for base in bases):
                yield f"{name}: raises {error.__name__}"
        for parameter, of in inspect.get_annotations(function).items():
            if MEASURES.fullmatch(parameter) and re.search("int|float|str", str(of)) and not UNITS.search(text):
                yield f"{name}: in what is {parameter}?"


def shapeless(definition: object) -> Iterator[str]:
    """Functions that take or give tensors, and say nothing of their shapes."""
    for name, function, text in code_of(definition):
        annotations = " ".join(map(str, inspect.get_annotations(function).values()))
        if re.search(r"Tensor\b", annotations) and not SHAPES.search(text):
            yield name


def shown() -> list[str]:
    """What the pages of the reference show."""
    return sorted({name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)})


def found(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", [*FACES, *STDLIB])
def test_what_users_meet_has_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert [missing for definition in exported(module) for missing in undocumented(definition)] == []
    assert [missing for definition in exported(module) for missing in unsaid(definition)] == []


def test_the_references_docstrings_say_errors_units_and_shapes() -> None:
    definitions = [each for name in shown() if callable(each := found(name))]
    assert len(definitions) > 100
    assert [missing for each in definitions for missing in (*unsaid(each), *shapeless(each))] == []


def test_what_a_docstring_leaves_out_is_found() -> None:
    def rest(seconds: float, timeout: float) -> None:
        """Waits."""
        if timeout < 0:
            raise ValueError("in the past")

    def double(tensor: torch.Tensor) -> torch.Tensor:
        """Twice as much."""
        return tensor * 2

    (lacks, unit), home = unsaid(rest), f"{__name__}.{rest.__qualname__}"
    assert (lacks, unit) == (f"{home}: raises ValueError", f"{home}: in what is timeout?")
    assert list(shapeless(double)) == [f"{__name__}.{double.__qualname__}"]
    rest.__doc__ = "Waits, at most `timeout` seconds. Raises ValueError for a time in the past."
    double.__doc__ = "Twice as much, of the same shape."
    assert [*unsaid(rest), *shapeless(double)] == []


def test_what_lacks_a_docstring_is_found() -> None:
    class Documented:
        """Has one."""

        def method(self) -> None: ...

        @property
        def value(self) -> int: ...

    for each in (Documented.method, Documented.value.fget):
        each.__module__ = "monarch.made_up"  # type: ignore[union-attr]
    home = f"{__name__}.{Documented.__qualname__}"
    assert list(undocumented(Documented)) == [f"{home}.method", f"{home}.value"]
    Documented.method.__doc__ = Documented.value.__doc__ = "Has one."
    assert list(undocumented(Documented)) == []
    Documented.__doc__ = None
    assert list(undocumented(Documented)) == [home]
