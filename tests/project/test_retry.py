"""`pytest --retry` (tests/retry.py): what failed is run once more by itself, and said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ONCE = """
import os
from pathlib import Path

import pytest

def first(name):
    '''Whether this is the first call for `name`, in any process.'''
    try:
        Path(name).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False
"""


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, list[str]]:
    """The exit status of `pytest --retry` on a file of `tests`, and the lines that it printed."""
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-ra'\n")
    (folder / "test_it.py").write_text(ONCE + tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MONARCH"))}
    environment["PYTHONPATH"] = str(ROOT)
    # No other plugins that are installed: each second run would load them all.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.retry", "--retry", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return result.returncode, (result.stdout + result.stderr).splitlines()


def unsteady(lines: list[str]) -> list[str]:
    return [line.removeprefix("UNSTEADY ") for line in lines if line.startswith("UNSTEADY ")]


UNSTEADY = """
import time

def test_call(): assert not first("call")

@pytest.fixture
def set_up(): assert not first("set-up")
def test_set_up(set_up): pass

@pytest.fixture
def tear_down():
    yield
    assert not first("tear-down")
def test_tear_down(tear_down): pass
def test_call_and_tear_down(tear_down): assert not first("both")

@pytest.mark.timeout(60 if Path("timeout").exists() else 1)
def test_timeout():
    if first("timeout"): time.sleep(100)

@pytest.mark.parametrize("x", ["a b::[c]"])
def test_parameter(x):
    done.append(x)
    assert not first(x.replace(":", "")) and done == [x], "a second run is a process of its own that runs nothing else"
done = []

def test_worker_dies():
    if first("worker"): os._exit(1)
"""
STEADY = "\ndef test_steady(): pass\n"
NAMES = ["call", "call_and_tear_down", "parameter[a b::[c]]", "set_up", "timeout"]
NAMES += ["worker_dies"]


def test_what_passes_alone_passes_and_is_named_before_the_summary(tmp_path: Path) -> None:
    status, lines = run(tmp_path, UNSTEADY + STEADY, "-n2")
    assert status == 0, lines
    found = unsteady(lines)
    # The tear-down of one of these two is the first for both.
    assert sorted(set(found) - {"test_it.py::test_tear_down"}) == [f"test_it.py::test_{name}" for name in NAMES]
    assert any(re.fullmatch(f"=+ UNSTEADY TESTS: {len(found)} =+", line) for line in lines)
    assert lines[-1 - len(found) : -1] == [f"UNSTEADY {name}" for name in found]
    assert re.fullmatch(rf"=+ {len(NAMES) + 2} passed in .*s\b.* =+", lines[-1])
    assert sum("first run of test_it.py::" in line for line in lines) == len(found)
    assert "E   AssertionError: assert not True" in lines, "the first failure's cause is shown"
    assert not any(line.startswith(("FAILED", "ERROR")) for line in lines)


def test_what_fails_twice_fails_the_run_and_both_failures_are_shown(tmp_path: Path) -> None:
    tests = """
def test_it(): assert 0, "first" if first("it") else "second"
def test_other(): assert not first("other")
def test_skipped():
    if first("skipped"): assert 0
    pytest.skip("what is skipped has not passed")
"""
    status, lines = run(tmp_path, tests + STEADY)
    assert status == 1, lines
    assert unsteady(lines) == ["test_it.py::test_other"]
    assert re.fullmatch(r"=+ 2 failed, 2 passed in .*s\b.* =+", lines[-1])
    assert "E   AssertionError: first" in lines and "E   AssertionError: second" in lines


def test_many_failures_are_not_unsteadiness(tmp_path: Path) -> None:
    tests = "@pytest.mark.parametrize('x', range(21))\ndef test_it(x): assert not first(str(x))\n"
    status, lines = run(tmp_path, tests)
    assert status == 1, lines
    assert "21 tests failed, more than 20: none is run again" in lines
    assert re.fullmatch(r"=+ 21 failed in .*s\b.* =+", lines[-1])


def test_a_run_that_stops_at_the_first_failure_fails(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "def test_it(): assert not first('it')" + STEADY, "-x")
    assert status != 0, lines
    assert unsteady(lines) == []


def test_a_file_that_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    status, lines = run(tmp_path, STEADY, "--continue-on-collection-errors")
    assert status == 1, lines
    assert re.fullmatch(r"=+ 1 passed, 1 error in .*s\b.* =+", lines[-1])


def test_a_run_in_which_all_passes_names_none(tmp_path: Path) -> None:
    status, lines = run(tmp_path, STEADY)
    assert status == 0
    assert not any("UNSTEADY" in line or "again" in line for line in lines)
