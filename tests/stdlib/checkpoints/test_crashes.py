"""A crash at any call of the file system in the middle of a save leaves the last good checkpoint."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import monarch
from monarch.stdlib.checkpoints import places
from tests import python
from tests.sample import is_full


@contextmanager
def crashing(folder: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with python.Popen("-m", "tests.stdlib.checkpoints.crashing", folder, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def crash(process: subprocess.Popen[str], who: str, number: int) -> tuple[int, bool]:
    """How many calls there were in the save, and whether it was said to be done."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{who} {number}\n")
    process.stdin.flush()
    count, done = process.stdout.readline().split()
    return int(count), done == "1"


def found(path: Path) -> int:
    """Which of the two saves stands there: all of it is of one."""
    into = {"x": torch.zeros(8), "number": 0}
    monarch.load(path, into=into)
    number = into["number"]
    assert isinstance(number, int) and torch.equal(into["x"], torch.arange(8.0) * number)
    return number


@pytest.mark.parametrize("who", ["controller", "worker"])
def test_a_crash_at_any_call_leaves_a_checkpoint_that_is_whole(who: str, tmp_path: Path) -> None:
    with crashing(tmp_path) as process:
        calls, done = crash(process, who, 10**9)
        assert done and found(tmp_path / f"{who}-{10**9}") == 2
        assert calls > (15 if who == "controller" else 3)
        points = list(range(calls))
        numbers: set[int] = set()
        for number in points if is_full() else sorted(random.Random(0).sample(points, min(3, calls))):
            passed, done = crash(process, who, number)
            path = tmp_path / f"{who}-{number}"
            assert passed == number and not done
            numbers.add(found(path))
            monarch.save({"x": torch.arange(8.0) * 3, "number": 3}, path).result()
            assert found(path) == 3
        assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]  # nothing is left behind
        assert 1 in numbers


def test_a_crash_between_the_renames_of_a_file_system_that_cannot_exchange_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    monarch.save({"x": torch.arange(8.0), "number": 1}, path).result()
    former = places.former_of(path)
    path.rename(former)  # what a crash behind the first rename leaves
    places.saving_folder(path).mkdir()
    assert found(path) == 1 and not former.exists()
    path.rename(former)
    monarch.save({"x": torch.arange(8.0) * 2, "number": 2}, path).result()
    assert found(path) == 2 and [each.name for each in tmp_path.iterdir()] == ["c"]
