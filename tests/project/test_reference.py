"""The reference in docs/: every name that `monarch` and its modules export is on a page, and nothing else is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from monarch.compiler.loading import load

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SHOWN = [
    name
    for page in (REFERENCE / "api").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    if not name.startswith("monarch.lightning.")  # it takes seconds to import
]
MODULES = ["monarch", "monarch.actor", "monarch.builtins", "monarch.config", "monarch.data", "monarch.distributed"]
MODULES += ["monarch.job", "monarch.launch", "monarch.rdma", "monarch.spmd", "monarch.telemetry"]
MODULES += ["monarch.testing.chaos"]


def find(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return load(f"{module}:{name}")


def test_what_the_pages_show_exists() -> None:
    assert [name for name in SHOWN if find(name) is None] == []
    assert len(SHOWN) == len(set(SHOWN))


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_exports_is_on_a_page(module: str) -> None:
    shown = [find(name) for name in SHOWN]
    for name in importlib.import_module(module).__all__:
        each = find(f"{module}.{name}")
        is_error = isinstance(each, type) and issubclass(each, BaseException)  # the page of errors has these
        is_theirs = getattr(each, "__module__", "").startswith("torch")
        if not (isinstance(each, ModuleType) or is_error or is_theirs):
            assert any(each is other for other in shown), f"{module}.{name} is on no page of docs/reference/api"


def test_each_error_and_warning_is_on_their_page() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (REFERENCE / "errors.md").read_text(), re.M)
    assert sorted(listed) == sorted(importlib.import_module("monarch.exceptions").__all__)
