"""Building kernels: what is kept and found again, what is refused, and many processes at once."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from monarch.compiler.kernels.cpp import build as building
from monarch.compiler.kernels.cpp.build import BuildError, Compiler, build, find_compiler, load

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def compiler() -> Compiler:
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    return found


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_what_was_built_is_found_again_without_the_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    first = build(SOURCE % 42, compiler, folder)
    assert answer(first) == 42

    def refuse(command: list[str]) -> None:
        raise AssertionError("the compiler was run")

    monkeypatch.setattr(building, "run", refuse)
    assert build(SOURCE % 42, compiler, folder) == first
    with pytest.raises(AssertionError):
        build(SOURCE % 43, compiler, folder)
    with pytest.raises(AssertionError):
        build(SOURCE % 42, replace(compiler, identity="another"), folder)


def test_another_processor_builds_anew(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(SOURCE % 1, compiler, tmp_path / "cache")
    monkeypatch.setattr(building, "processor", lambda: "another")
    second = build(SOURCE % 1, compiler, tmp_path / "cache")
    assert first != second and answer(second) == 1


def test_several_that_build_the_same_at_once_all_get_a_whole_object(compiler: Compiler, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build(SOURCE % 7, compiler, tmp_path / "cache"), range(4)))
    assert len(set(paths)) == 1 and answer(paths[0]) == 7
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [paths[0].name]


def test_the_folder_is_the_users_alone(compiler: Compiler, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    build(SOURCE % 1, compiler, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    os.chmod(folder, 0o755)
    with pytest.raises(BuildError, match="others than you"):
        build(SOURCE % 1, compiler, folder)


def test_a_folder_reached_through_a_link_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    with pytest.raises(BuildError):
        build(SOURCE % 1, compiler, tmp_path / "cache")


def test_an_object_that_others_could_have_written_is_built_anew(compiler: Compiler, tmp_path: Path) -> None:
    path = build(SOURCE % 5, compiler, tmp_path / "cache")
    path.write_bytes(b"not code")
    os.chmod(path, 0o722)
    assert answer(build(SOURCE % 5, compiler, tmp_path / "cache")) == 5


@pytest.mark.parametrize("damage", ["cut short", "empty", "another's"])
def test_an_object_that_is_not_whole_is_built_anew(compiler: Compiler, tmp_path: Path, damage: str) -> None:
    """Cut short, it would end every worker that loads it with SIGBUS, for as long as it is there."""
    path, other = (build(SOURCE % number, compiler, tmp_path / "cache") for number in (5, 6))
    whole = path.read_bytes()
    path.write_bytes({"cut short": whole[: len(whole) // 2], "empty": b"", "another's": other.read_bytes()}[damage])
    with pytest.raises(BuildError, match="no kernel that was built here"):
        load(path)
    assert build(SOURCE % 5, compiler, tmp_path / "cache") == path and path.read_bytes() == whole
    assert load(path).answer() == 5


def test_the_compilers_words_are_in_the_error_and_nothing_is_kept(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no_such_type"):
        build("no_such_type x;", compiler, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_nobody_asked_for_in_a_month_is_deleted(compiler: Compiler, tmp_path: Path) -> None:
    old, used = (build(SOURCE % number, compiler, tmp_path / "cache") for number in (1, 2))
    long_ago = os.stat(old).st_mtime - 31 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    os.utime(used, (long_ago, long_ago))
    build(SOURCE % 2, compiler, tmp_path / "cache")
    build(SOURCE % 3, compiler, tmp_path / "cache")
    assert not old.exists() and used.exists()


def test_only_the_users_own_objects_are_loaded(compiler: Compiler, tmp_path: Path) -> None:
    path = build(SOURCE % 9, compiler, tmp_path / "cache")
    assert load(path).answer() == 9
    copy = tmp_path / "open" / "copy.so"
    copy.parent.mkdir(mode=0o755)
    copy.write_bytes(path.read_bytes())
    with pytest.raises(BuildError, match="others than you"):
        load(copy)
    other = path.with_name("other.so")
    other.write_bytes(path.read_bytes())
    os.chmod(other, 0o722)
    with pytest.raises(BuildError, match="no kernel that was built here"):
        load(other)


def test_no_compiler_is_none_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert find_compiler.__wrapped__() is None


def test_the_cache_lies_where_the_switch_says(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    assert build(SOURCE % 1, compiler).parent == tmp_path / "kernels"
