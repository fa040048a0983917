"""What is shipped: the wheel's and the sdist's contents, and the face that `import monarch` shows."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import monarch

ROOT = Path(__file__).parents[2]
FOLDERS = ("compiler", "language", "runtime", "stdlib")
PAGE = "monarch/compiler/inspect/page/page.html"


def sources() -> set[str]:
    """Every file of ours, as it should lie in the wheel."""
    package = ROOT / ".src" / "monarch"  # links are not followed
    files = {f"monarch/{path.relative_to(package)}" for path in package.glob("**/*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    for folder in FOLDERS:
        paths = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
        files |= {f"monarch/{path}" for path in paths if "__pycache__" not in path.parts}
    # What the inspector's page is built from stays behind: the wheel has the built page.
    return {name for name in files if not name.startswith("monarch/compiler/inspect/page/web/")}


def build(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def check_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name == f"monarchc-{monarch.__version__}-py3-none-any.whl"
    assert {name for name in names if name.startswith("monarch/")} == sources()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"monarch", f"monarchc-{monarch.__version__}.dist-info"}, "something else would be installed too"
    assert PAGE in names


def test_the_wheel_holds_every_file_of_ours_and_nothing_else(tmp_path: Path) -> None:
    check_wheel(build("wheel", ROOT, tmp_path))


def test_the_sdist_builds_the_same_wheel(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    check_wheel(build("wheel", unpacked, tmp_path / "wheel"))


def test_a_wheel_is_not_built_without_the_inspectors_page(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    (unpacked / ".src" / PAGE).unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", str(unpacked)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert "page.html has not been built: run 'make setup'" in result.stdout + result.stderr


def test_the_sdist_holds_no_build_or_cache(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("/LICENSE") for name in names)
    unwanted = ("__pycache__", "/.venv/", "/node_modules/")
    assert [name for name in names if name.endswith(".mplan") or any(part in name for part in unwanted)] == []


def test_every_public_name_loads() -> None:
    for name in monarch.__all__:
        assert getattr(monarch, name) is not None, name
    with pytest.raises(AttributeError, match="module 'monarch' has no attribute 'mesh_of_dreams'"):
        monarch.mesh_of_dreams  # noqa: B018


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    """The names under TYPE_CHECKING, their homes, and `__all__` are one list."""
    tree = ast.parse(Path(monarch.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        alias.name: statement.module
        for statement in checked.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == monarch._HOME
    assert sorted(seen) == monarch.__all__
    assert set(seen) <= set(dir(monarch))


def test_importing_monarch_loads_neither_language_nor_runtime() -> None:
    program = "import sys, monarch; print(sorted(m for m in sys.modules if m.startswith(('monarch.la', 'monarch.r'))))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_all_public_errors_are_in_one_module() -> None:
    """What `monarch` and its public modules export of errors and warnings is also in `monarch.exceptions`."""
    modules = [monarch, monarch.actor, monarch.config, monarch.distributed, monarch.launch, monarch.rdma, monarch.spmd]
    public = {
        name
        for module in modules
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) and issubclass(value, (monarch.MonarchError, Warning))
    }
    assert public <= set(monarch.exceptions.__all__)
    assert all(issubclass(getattr(monarch.exceptions, name), Exception) for name in monarch.exceptions.__all__)
