"""Every public definition that a user meets has a docstring: what `monarch` and its public modules export, all of the
standard library, and their public methods. An override may leave its docstring to what it overrides."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import monarch.stdlib

FACES = ["monarch", "monarch.actor", "monarch.distributed", "monarch.launch", "monarch.rdma", "monarch.spmd"]
FACES += ["monarch.telemetry", "monarch.testing.chaos"]
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


@pytest.mark.parametrize("name", [*FACES, *STDLIB])
def test_what_users_meet_has_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert [missing for definition in exported(module) for missing in undocumented(definition)] == []


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
