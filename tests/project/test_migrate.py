"""docs/migrate: what the pages say is here, is here."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
PAGE = PAGES / "torchmonarch.md"


def rows() -> list[tuple[list[str], list[str], str]]:
    """For each line of the tables: the modules that its heading names, the names in it, and what it says."""
    modules: list[str] = []
    lines = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            modules = re.findall(r"`([\w.]+)`", line)
        elif line.startswith("| `"):
            theirs, here = line.strip("| ").split(" | ")
            lines.append((modules, re.findall(r"`(\w+)`", theirs), here))
    return lines


def test_what_is_the_same_is_here_under_that_name() -> None:
    same = [(modules, name) for modules, names, here in rows() if here.startswith("same") for name in names]
    assert len(same) > 40
    missing = [name for modules, name in same if not any(hasattr(resolve_name(module), name) for module in modules)]
    assert missing == []


def test_what_is_not_here_is_not() -> None:
    """A name that has come is no longer said to be missing."""
    absent = [(modules, name) for modules, names, here in rows() if here.startswith("not here") for name in names]
    assert len(absent) > 20
    modules = ("actor", "builtins", "config", "job", "rdma", "spmd")
    importable = {"monarch", *(f"monarch.{name}" for name in modules)}
    assert [name for named, name in absent for m in named if m in importable and hasattr(resolve_name(m), name)] == []


def test_what_is_named_instead_is_here() -> None:
    named = [name for *_, here in rows() for name in re.findall(r"`@?(monarch\.[\w.]+)", here)]
    assert len(named) > 15
    for page in {*PAGES.glob("*.md")} - {PAGE}:
        named += re.findall(r"`@?(monarch\.[a-z_]+(?:\.[a-z_]+)*)", page.read_text())
    for name in named:
        assert resolve_name(name) is not None, name


def test_the_names_are_those_of_each_module_once() -> None:
    for module in {modules[0] for modules, *_ in rows()}:
        names = [name for modules, names, _ in rows() for name in names if modules[0] == module]
        assert len(names) == len(set(names)), module
