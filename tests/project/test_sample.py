"""`make test` runs a sample of long tests, `make test-full` all of each (tests/sample.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest
from hypothesis import given, strategies as st
from tests.sample import examples, is_full

@pytest.mark.sample(3)
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("a", range(5))
def test_sampled(a, b): pass

@pytest.mark.sample(1, of="b")
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(5))
def test_either(a, b): pass

@pytest.mark.sample()
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("a", range(3))
def test_each_value(a, b): pass

@pytest.mark.full
@pytest.mark.sample(1)
def test_long(): pass

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.full)])
def test_with_a_long_case(x): pass

tried = []
@examples(5, 30)
@given(st.integers())
def test_examples(x): tried.append(x)
def test_how_many(): assert len(tried) == (30 if is_full() else 5)
"""


def outcome(folder: Path, *arguments: str, test: str = "test_sampled") -> tuple[str, set[str]]:
    """Of a run of TESTS: pytest's last line without its time, and the cases of one test that passed."""
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "test_it.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TESTS"))}
    environment["PYTHONPATH"] = str(ROOT)
    # No other plugins that are installed, which take longer than the tests.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    command = [sys.executable, "-m", "pytest", "-rp", "-p", "tests.sample", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    passed = {line.removeprefix("PASSED ") for line in lines if line.startswith(f"PASSED test_it.py::{test}[")}
    return lines[-1].strip("= ").partition(" in ")[0], passed


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    summary, passed = outcome(tmp_path_factory.mktemp("sampled"))
    assert summary == "15 passed, 37 deselected"
    return passed


@pytest.mark.full
def test_a_sample_is_the_same_in_each_process(sampled: set[str], tmp_path: Path) -> None:
    assert len(sampled) == 3
    assert outcome(tmp_path, "-n2", "--dist=loadfile") == ("15 passed", sampled)


def test_a_sample_of_one_parameter_has_all_values_of_the_others(tmp_path: Path) -> None:
    _, passed = outcome(tmp_path, test="test_either")
    assert sorted(case.partition("[")[2][0] for case in passed) == ["0", "1", "2", "3", "4"]


def test_a_sample_without_a_number_has_each_value_of_each_parameter(tmp_path: Path) -> None:
    _, passed = outcome(tmp_path, test="test_each_value")
    cases = [case.partition("[")[2].rstrip("]").split("-") for case in passed]
    assert len(cases) == 4 and [set(values) for values in zip(*cases, strict=True)] == [set("012"), set("0123")]


def test_all_cases_run_in_full(sampled: set[str], tmp_path: Path) -> None:
    summary, passed = outcome(tmp_path, "--full")
    assert summary == "52 passed" and len(passed) == 20 and sampled < passed


def test_a_test_that_is_named_runs(sampled: set[str], tmp_path: Path) -> None:
    summary, passed = outcome(tmp_path, "test_it.py::test_long", "test_it.py::test_sampled")
    assert summary == "21 passed" and sampled < passed
