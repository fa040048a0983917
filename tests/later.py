"""Packages that take a second to load, and that the tests of one file alone need: each process collects all files."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """A package that is imported, with these modules of it, when one of its attributes is first read.

    pyarrow = Later("pyarrow", "parquet")

    pytest asks all that stands in a file of tests for attributes of its own, which no package has.
    """

    def __init__(self, name: str, *modules: str) -> None:
        self._names = [name, *(f"{name}.{module}" for module in modules)]

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):
            raise AttributeError(attribute)
        package, *_ = [import_module(name) for name in self._names]
        found = getattr(package, attribute)
        setattr(self, attribute, found)
        return found
