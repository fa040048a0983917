"""What holds for every file of the project."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A path that exists only on somebody's machine, other than the made-up users that tests speak of.
MACHINE_PATH = re.compile(r"(?<![\w./<{$-])/(?!home/(?:me|user)/)(?:home|root|work|Users|mnt|opt|srv|data)/[\w.-]+")


def tracked() -> list[Path]:
    """The project's files: what git knows, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


def python_files(*folders: str) -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]


@pytest.mark.parametrize("line", ["see /home/ann/notes.txt", "open('/root/x')", "in /work/main", "/data/corpus.txt"])
def test_a_machine_path_is_recognised(line: str) -> None:
    assert MACHINE_PATH.search(line)


@pytest.mark.parametrize(
    "line", ["https://x.org/home/page", "tests/data/x.txt", "/home/me/x.py", "$TMP/work/x", "/dev/shm/monarch-1"]
)
def test_what_is_no_machine_path_is_not(line: str) -> None:
    assert not MACHINE_PATH.search(line)


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path != Path(__file__)
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


SISTERS = {
    "compiler/kernels": {"Function", "Schedule"},  # C++'s and Triton's
    "runtime/transport": {"Completions", "Device", "Library", "MemoryRegion", "QueuePair"},  # two libraries of verbs
    "stdlib/models": {"Attention", "Block"},  # each model's
}
"""Classes that are the same thing in several forms."""


def test_a_class_is_the_only_one_of_its_name_in_its_folder() -> None:
    """Of a Protocol there may be implementations that are called so, too."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in python_files("compiler", "language", "runtime", "stdlib"):
        folder = "/".join(path.relative_to(ROOT).parts[:2])
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
                if node.name not in SISTERS.get(folder, ()):
                    places[folder, node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [at for at in places.values() if len(at) > 1] == []


def test_the_environment_is_read_in_one_place() -> None:
    """compiler/config/store.py reads every setting; elsewhere the environment may be handed on, but not read."""
    found = []
    package = (ROOT / ".src" / "monarch").glob("**/*.py")  # links are not followed
    for path in (*python_files("compiler", "language", "runtime", "stdlib"), *package):
        if path == ROOT / "compiler" / "config" / "store.py":
            continue
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "environ" in source or "getenv" in source else ():
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
            loads = not (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
            if loads and text.startswith(("os.getenv(", "os.environ.get(", "os.environ[", "getenv(", "environ.get(")):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert found == []


LONG = {"tests/language/programs/stateful_lines.py": 700}
"""Files that are longer than others may be."""


def test_python_files_are_of_readable_length() -> None:
    files = [path for path in tracked() if path.suffix == ".py"]
    lines = {str(path.relative_to(ROOT)): text_of(path).count("\n") for path in files}
    assert {name: count for name, count in lines.items() if count > LONG.get(name, 600)} == {}


def test_a_constant_of_a_module_has_one_value() -> None:
    """Two changes that each add one of the same name meet without a conflict: the later value then holds for both."""
    twice = []
    for path in python_files("compiler", "language", "runtime", "stdlib"):
        body = ast.parse(text_of(path)).body
        names = [
            each.id
            for node in body
            if isinstance(node, ast.Assign)
            for each in node.targets
            if isinstance(each, ast.Name)
        ]
        twice += [f"{path}: {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    assert not twice


def test_the_folders_are_linked_into_the_package() -> None:
    for folder in ("compiler", "language", "runtime", "stdlib"):
        link = ROOT / ".src" / "monarch" / folder
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == ROOT / folder
