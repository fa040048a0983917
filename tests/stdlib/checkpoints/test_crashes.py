"""A crash at any call of the file system in the middle of a save leaves the last good checkpoint."""

from __future__ import annotations

import json
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.execution.storage import Written
from monarch.compiler.types import MeshSpec, TensorType
from monarch.distributed import Mesh
from monarch.exceptions import CheckpointError, DeviceMeshError
from monarch.runtime.controller.storing import type_text
from monarch.runtime.shared import wire
from monarch.runtime.shared.files import Target
from monarch.runtime.worker import files as worker_files
from monarch.runtime.worker.messages import Fetched
from monarch.stdlib.checkpoints import places
from tests import python
from tests.sample import is_full
from tests.stdlib.checkpoints.files import WritingHere


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


def test_a_save_that_fails_gives_its_path_back_when_the_workers_have_ended_theirs(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, path = Mesh(data=2), tmp_path / "c"
    seen: list[bool] = []
    polled = WritingHere.poll

    def poll(self: WritingHere) -> Written:
        raise DeviceMeshError("a worker cannot write")

    monkeypatch.setattr(WritingHere, "poll", poll)
    monkeypatch.setattr(WritingHere, "end", lambda self: seen.append(places.saving_folder(path).exists()))
    state = {"x": monarch.distribute(torch.arange(8.0), mesh), "number": 1}
    with pytest.raises(CheckpointError, match="a worker cannot write") as failed:
        monarch.save(state, path).result()
    assert seen[0] and not list(tmp_path.iterdir())
    assert f"no checkpoint is at {path}. Save again" in str(failed.value)
    path.mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint is at"):
        monarch.save(state, path).result()
    with monkeypatch.context() as patched:
        patched.setattr(WritingHere, "poll", polled)
        monarch.save(state, path).result()
    with pytest.raises(CheckpointError, match="the former checkpoint is still there"):
        monarch.save(state, path).result()
    assert found(path) == 1


def test_a_save_that_is_ended_is_done_once_nothing_of_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    within, go_on = threading.Event(), threading.Event()

    class Slow(Target):
        def write(self, *arguments: Any) -> list[str]:
            within.set()
            go_on.wait()
            return super().write(*arguments)

    def told(stop: int) -> Any:
        (message,) = files.tell(0, bytearray(wire.numbers(wire.WRITTEN, 7, stop)))
        assert isinstance(message, Fetched)
        return json.loads(bytes(message.tensor.tolist()))

    monkeypatch.setattr(worker_files, "Target", Slow)
    files = worker_files.Files(MeshSpec((("data", 1),)), 0, lambda handle: torch.arange(8.0))
    type_ = type_text(TensorType(torch.float32, (8,)))
    pieces = [[0, str(tmp_path / name), 0, 0, 4 * at, 4] for at, name in enumerate("ab")]
    job = {"save": 7, "values": [[1, type_, pieces]], "last": True, "place": None}
    assert files.write(0, bytearray(wire.pack_json(wire.WRITE, job))) == []
    within.wait()
    assert not told(0)["done"] and not told(1)["done"] and not told(1)["done"]
    go_on.set()
    while not told(1)["done"]:
        pass
    assert not files.writing and [each.name for each in tmp_path.iterdir()] == ["a"]
