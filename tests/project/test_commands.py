"""What `make demo` and `make test` set up, and what CI runs (`.ci/run`), in order and each within its bound."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ["setup -j2", "check docs -j2 -Otarget", "test ARGS=--retry"]


def run(folder: Path, **programs: str) -> tuple[int, str, list[str]]:
    """The status and errors of `.ci/run` where `programs` stand in for those of the system, and the calls of make."""
    calls = folder / "calls"
    calls.touch()
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)}
    result = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stderr, calls.read_text().splitlines()


def test_ci_sets_up_checks_and_tests(tmp_path: Path) -> None:
    assert run(tmp_path, make='echo "$@" >> $CALLS') == (0, "", COMMANDS)


@pytest.mark.parametrize("failing", range(len(COMMANDS)))
def test_ci_ends_with_the_first_command_that_fails(tmp_path: Path, failing: int) -> None:
    make = f'echo "$@" >> $CALLS; test "$1" != {COMMANDS[failing].split()[0]}'
    assert run(tmp_path, make=make) == (1, "", COMMANDS[: failing + 1])


def test_a_command_that_takes_too_long_is_named(tmp_path: Path) -> None:
    status, errors, calls = run(tmp_path, timeout='shift 2; echo "$@" >> $CALLS; exit 124')
    assert status == 124
    assert errors == ".ci/run: `make setup -j2` took longer than 25 minutes and was ended.\n"
    assert calls == ["1500 make setup -j2"]


@pytest.mark.parametrize(("target", "extras"), [("demo", False), ("test", True)])
def test_the_demo_sets_up_no_more_than_it_needs(tmp_path: Path, target: str, extras: bool) -> None:
    missing = [f"{name}={tmp_path / name}" for name in ("VENV", "MODULES", "PAGE")]
    command = ["make", "--dry-run", "--no-print-directory", target, *missing]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ".ci/setup" in result.stdout and "pip" not in result.stdout
    assert ("npm ci" in result.stdout, "npm run" in result.stdout, '" dev,docs\n' in result.stdout) == (extras,) * 3
