"""Who may import what (docs/internals/architecture.md), and that the rules would notice."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import grimp
import pytest

from monarch.compiler.loading import load

ROOT = Path(__file__).parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the checkout in `folder`, with its own `.src` first on the path."""
    program = (
        f"import sys; sys.path.insert(0, {str(folder / '.src')!r})\n"
        "from importlinter.cli import lint_imports\n"
        f"sys.exit(lint_imports(config_filename={str(folder / 'pyproject.toml')!r}, no_cache=True))"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_import_rules_are_kept() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
ARCHITECTURE = (ROOT / "docs" / "internals" / "architecture.md").read_text()


def layers(folder: str) -> list[set[str]]:
    """What stands beside each other within a folder, from above, as import-linter is told."""
    (found,) = [each["layers"] for each in CONTRACTS if each.get("containers") == [f"monarch.{folder}"]]
    return [set(layer.split(" | ")) for layer in found]


@pytest.mark.parametrize(("folder", "first"), [("compiler", "cli"), ("language", "check")])
def test_the_architecture_page_has_the_layers(folder: str, first: str) -> None:
    """Each row has its names, then what is in them; a row without names goes on with that."""
    (table,) = [each for each in ARCHITECTURE.split("\n\n") if re.match(rf"    {first}\b", each)]
    lines = [line for line in table.splitlines() if re.match("    [a-z]", line)]
    assert [set(re.findall(r"\w+", re.split(" {4,}", line.strip())[0])) for line in lines] == layers(folder)


def test_the_architecture_page_draws_the_floors_of_the_runtime() -> None:
    (drawing,) = [each for each in ARCHITECTURE.split("\n\n") if each.startswith("    ┌")]
    floors = [line for line in drawing.splitlines() if line.startswith("    │")]
    assert [set(re.findall(r"│ (\w+)", line)) for line in floors] == layers("runtime")


def test_the_architecture_page_says_what_the_runtime_may_import() -> None:
    (row,) = re.findall(r"\| `runtime/` \|.*\| of `compiler`: (.*?); in `worker/device/`", ARCHITECTURE)
    said = {name.removesuffix(".py").replace("/", ".") for name in re.findall("`(.*?)`", row)}
    (allowed,) = [
        each["ignore_imports"] for each in CONTRACTS if each["name"].startswith("runtime sees of the compiler")
    ]
    # Besides what kernels are made of, for devices: the controller builds them, once for all workers of a host.
    general = [rule for rule in allowed if "worker.device" not in rule and ".kernels." not in rule]
    assert said == {rule.partition(" -> monarch.compiler.")[2].rstrip(".*") for rule in general}


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("monarch", exclude_type_checking_imports=True, cache_dir=None)


@pytest.mark.parametrize("folder", ["compiler", "language", "runtime"])
def test_there_are_no_import_cycles(folder: str) -> None:
    """What is loaded by name counts as imported. Imports that only a type checker follows are left out."""
    graph = imports()
    names = [name for name in graph.modules if name.startswith(f"monarch.{folder}.")]
    left = {name: graph.find_modules_directly_imported_by(name) for name in names}
    for name in left:
        path = ROOT / ".src" / Path(*name.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        left[name] |= {named.partition(":")[0] for named in loaded_by_name(source)}
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []


def loaded_by_name(path: Path) -> set[str]:
    """What a module names in calls of `load`, and of `command` where it declares commands."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("load", "command")
        if node.args and isinstance(node.args[0], ast.Constant)
    }


def test_what_is_loaded_by_name_is_there() -> None:
    named = {
        name
        for folder in ("compiler", "language", "runtime", "stdlib", ".src")
        for path in (ROOT / folder).rglob("*.py")
        for name in loaded_by_name(path)
        if name.startswith("monarch.")
    }
    assert {"monarch.compiler.pipeline:compile_graph", "monarch.compiler.cli.tune:tune"} <= named
    for name in sorted(named):
        load(name)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small project with the real rules, for breaking them."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / ".src" / "monarch"
    parts = [
        (folder, part)
        for folder in ("compiler", "language", "runtime")
        for part in (ROOT / folder).iterdir()
        if (part / "__init__.py").exists() or part.suffix == ".py"
    ]
    modules = [f"{folder}/{part.stem}" for folder, part in parts if part.stem != "__init__"]
    for module in [*modules, "stdlib"]:
        (package / module).mkdir(parents=True, exist_ok=True)
    for folder in [package, *package.rglob("*")]:
        (folder / "__init__.py").touch()
    return tmp_path


ALLOWED = [
    ("language", "monarch.compiler.types"),
    ("runtime", "monarch.compiler.plan"),
    ("stdlib", "monarch.language"),
    ("stdlib", "monarch.runtime"),
    ("compiler/cli", "monarch.language"),
    ("compiler/plan", "monarch.compiler.types"),
    ("language/programs", "monarch.language.optimizers"),
    ("language/check", "monarch.language.layouts"),
    ("runtime/actors", "monarch.runtime.hosts"),
    ("runtime/worker", "monarch.runtime.processes"),
]
FORBIDDEN = [
    ("compiler/plan", "monarch.compiler.schedule"),
    ("compiler/passes", "monarch.compiler.inspect"),
    ("compiler/types", "monarch.compiler.graph"),
    ("language", "monarch.runtime"),
    ("language", "monarch.stdlib"),
    ("language/tensors", "monarch.language.recorder"),
    ("language/recorder", "monarch.language.placing"),
    ("language/eager", "monarch.language.programs"),
    ("language/errors", "monarch.language.tensors"),
    ("runtime", "monarch.language"),
    ("runtime", "monarch.compiler.types"),
    ("runtime", "monarch.compiler.passes"),
    ("compiler/plan", "monarch.runtime"),
    ("compiler/passes", "monarch.language"),
    ("compiler/passes", "monarch.compiler.cli"),
    ("runtime/processes", "monarch.runtime.worker"),
    ("runtime/controller", "monarch.runtime.worker"),
    ("runtime/hosts", "monarch.runtime.actors"),
    ("runtime/shared", "monarch.runtime.transport"),
]


def add_imports(checkout: Path, imports: list[tuple[str, str]]) -> None:
    for module, imported in imports:
        with (checkout / ".src" / "monarch" / module / "__init__.py").open("a") as file:
            file.write(f"import {imported}\n")


def test_allowed_imports_pass(checkout: Path) -> None:
    add_imports(checkout, ALLOWED)
    result = lint_imports(checkout)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_forbidden_import_is_noticed(checkout: Path) -> None:
    add_imports(checkout, FORBIDDEN)
    result = lint_imports(checkout)
    assert result.returncode == 1, result.stdout + result.stderr
    # A chain of imports that a rule forbids has its first line behind a dash, and ends where the next line is empty.
    alone = set(re.findall(r"^- +monarch\.(\S+) -> (\S+) \(l\.\d+\)$(?!\n +monarch)", result.stdout, re.MULTILINE))
    named = {(module.replace(".", "/"), imported) for module, imported in alone}
    assert sorted(set(FORBIDDEN) - named) == []


@pytest.mark.parametrize("name", ["compiler", "language", "runtime", "stdlib"])
def test_importing_a_folder_by_its_top_level_name_is_banned(name: str) -> None:
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--stdin-filename",
        str(ROOT / "language" / "x.py"),
        "-",
    ]
    result = subprocess.run(
        ruff, input=f"import {name}\n\nprint({name})\n", cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert f"`{name}` is banned: import monarch.{name}" in result.stdout


def test_modules_import_one_another_at_their_heads() -> None:
    """Imports within functions hide cycles; libraries that are heavy to load may be imported so, and modules of ours
    loaded by name (`compiler/loading.py`)."""
    found = []
    folders = ("compiler", "language", "runtime", "stdlib")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if not re.search(r"^\s+(import|from) +monarch", text, re.MULTILINE):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                    found += [f"{path.relative_to(ROOT)}:{node.lineno}" for name in names if name.startswith("monarch")]
    assert found == []


def test_workers_and_their_controller_start_without_the_parser_grpc_and_transports() -> None:
    """A plan carries no text that lark would parse, and hosts are attached by those who ask for it. All workers wait
    while the process that they are forked from imports what runs in them."""
    code = (
        "import sys, monarch.runtime.controller.executor, monarch.runtime.worker.loop\n"
        "unwanted = ('lark', 'grpc', 'cryptography', 'pdb', 'monarch.runtime.transport.interface',\n"
        "    'monarch.runtime.control.security', 'monarch.runtime.collectives.mirror')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout == "[]\n", result.stderr


def test_import_monarch_loads_next_to_nothing() -> None:
    """Who writes a program waits for it each time: no torch, and no settings before something asks for them."""
    code = (
        "import sys, monarch\n"
        "print([name for name in ('torch', 'monarch.compiler.config', 'difflib') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout == "[]\n", result.stderr
