"""Tests ask the product through names that it shows: what begins with `_` may change without a word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.test_files import ROOT, python_files

PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!_)")

ALLOWED = {
    # What users hold has no public names but those that users need.
    "_ref": "a tensor's place on its mesh: whether a value was computed, or was let go, shows nowhere else",
    "_programs": "which functions a mesh has traced for Mesh.execute",
    "_bound": "a program's methods by object: none may keep an object alive",
    "_meshes": "the meshes of this process, and those of a job: a test has none but its own",
    "_attached": "the connection behind a HostMesh",
    "_agents": "the processes behind a HostMesh",
    "_addresses": "the processes behind a ProcMesh",
    "_group": "how a ProcMesh was asked for",
    "_callbacks": "who waits for a Future: one that has given up leaves nothing",
    "_started": "the processes of a job's hosts, which it ends",
    "_connected": "the hosts that a job has given out",
    "_folder": "where a job of Kubernetes keeps its certificates",
    "_certified": "the names that a job's certificate has for a pod",
    "_trouble": "why a pod does not start, as a job reads its status",
    "_reader": "the thread that reads ahead behind a stream of batches",
    "_log": "the file from which the live page's curves come, which is read when it is time",
    # Of tests that put a stand-in into the product, where nothing else can be brought to fail so.
    "_memories": "what an opened RDMA device has registered",
    "_receive": "a link's code that breaks",
    "_renew": "what a class of tests overrides",
}
"""Private names of the product that tests may use, and why no public one shows the same."""


GIVEN = re.compile(r"self\.(_\w+)[^=\n]*=[^=]|^\s*(?:async )?(?:def|class) (_\w+)|^\s*(_\w+)\s*[:=]", re.MULTILINE)
"""Private names that a file gives: to attributes, functions, classes and variables of its own."""


def given(source: str) -> set[str]:
    return {name for names in GIVEN.findall(source) for name in names if PRIVATE.fullmatch(name)}


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The private names of others that a module uses, with lines: attributes, imports, and names that are patched."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and ast.unparse(node.value) not in OTHERS:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("monarch"):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "setitem"):
            yield from ((node.lineno, each.value) for each in node.args[1:2] if isinstance(each, ast.Constant))


OTHERS = {"self", "cls", "os", "sys", "torch", "aten", "ops", "torch.ops.aten", "torch._C"}
"""What has private names that are not the product's."""
THEIRS = {"_base", "_modules", "_schema", "_replace", "_value", "_Options", "_threads", "_timeout"}
"""Names of Python's and PyTorch's objects."""


def uses_of_private(source: str, ours: set[str]) -> list[str]:
    if not re.search(r"""[."']_[A-Za-z]|import\b.*\b_[A-Za-z]""", source):
        return []
    names = ours - given(source) - ALLOWED.keys()
    return [f"{line}: {name}" for line, name in used(ast.parse(source)) if name in names]


def test_tests_use_no_private_names_of_the_product() -> None:
    folders = ("compiler", "language", "runtime", "stdlib")
    ours = set().union(*(given(path.read_text()) for path in python_files(*folders))) - THEIRS
    files = {path.relative_to(ROOT): path.read_text() for path in python_files("tests")}
    assert [f"{path}:{use}" for path, text in files.items() for use in uses_of_private(text, ours)] == []
    everything = "\n".join(text for path, text in files.items() if path.name != Path(__file__).name)
    assert [name for name in ALLOWED if f".{name}" not in everything and f'"{name}"' not in everything] == []


@pytest.mark.parametrize(
    "use", ["one._hidden.clear()", "from monarch.runtime import _hidden", 'monkeypatch.setattr(one, "_hidden", 1)']
)
def test_a_private_name_is_noticed(use: str) -> None:
    ours = given("class One:\n    def __init__(self):\n        self._hidden: list[int] = []\n")
    assert uses_of_private(use, ours) == ["1: _hidden"]
    assert uses_of_private(f"{use}\nclass Own:\n    def _hidden(self): ...", ours) == []
