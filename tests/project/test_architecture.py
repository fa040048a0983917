"""docs/internals/architecture.md draws the layers that are enforced, and what pages and comments refer to exists."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.project.test_files import ROOT, python_files, tracked

PAGE = (ROOT / "docs" / "internals" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
FOLDERS = "compiler|language|runtime|stdlib|tests|examples|benchmarks"


def layers(of: str) -> list[set[str]]:
    (contract,) = (each for each in CONTRACTS if each["type"] == "layers" and each.get("containers") == [of])
    return [set(layer.split(" | ")) for layer in contract["layers"]]


@pytest.mark.parametrize("of", ["compiler", "language"])
def test_the_layers_are_those_that_are_enforced(of: str) -> None:
    block = PAGE[re.search(rf"^`{of}/` is in .*:\n\n", PAGE, re.MULTILINE).end() :].partition("\n\n")[0]  # type: ignore[union-attr]
    rows = [line.replace("│", " ").split() for line in block.splitlines() if re.match(r" {4}\w", line)]
    enforced = layers(f"monarch.{of}")
    assert [set(row[: len(layer)]) for row, layer in zip(rows, enforced, strict=True)] == enforced


def test_the_floors_of_the_runtime_are_those_that_are_enforced() -> None:
    drawing = re.search(r"^    ┌.*?^    └", PAGE, re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]
    rows = [re.findall(r"│ (\w+)", line) for line in drawing.splitlines() if "│" in line]
    assert [set(row) for row in rows] == layers("monarch.runtime")


def test_files_that_pages_name_exist() -> None:
    ends = {"/".join(parts[at:]) for path in tracked() for parts in [path.relative_to(ROOT).parts] for at in range(9)}
    missing = []
    for page in (ROOT / "README.md", *(ROOT / "docs" / "internals").glob("*.md")):
        for name in re.findall(r"`([\w./-]+)`", page.read_text()):
            ours = re.match(rf"({FOLDERS})/", name)
            if name not in ends and (re.search(r"\.(py|cpp|proto)$", name) or (ours and not (ROOT / name).exists())):
                missing.append(f"{page.name}: {name}")
    assert missing == []


def test_modules_that_comments_name_exist() -> None:
    """As `hosts/remote.py` or `hosts.remote.RemoteMesh`."""
    rooms = {*FOLDERS.split("|")[:4], *(floor for each in layers("monarch.runtime") for floor in each)}
    files = [path.relative_to(ROOT) for path in python_files(*FOLDERS.split("|")[:4])]
    known = {path.with_suffix("").parts for path in files} | {path.parent.parts for path in files}
    known |= {parts[1:] for parts in known}
    missing = []
    for path in files:
        for name in re.findall(r"`(\w+(?:[./]\w+)+)`", (ROOT / path).read_text()):
            parts = tuple(re.split(r"[./]", name.removesuffix(".py")))
            if (
                parts[0] in rooms
                and parts not in known
                and not any(parts[:end] in known for end in range(2, len(parts)))
            ):
                missing.append(f"{path}: {name}")
    assert missing == []
