"""`monarch.log`: nothing waits for the workers, everything is written in order, also at the program's end."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.errors import DeviceMeshError, MonarchError, ProgramError
from monarch.compiler.execution.factories import executors_by
from monarch.distributed import Mesh
from tests import python
from tests.language.dense import DenseExecutor, DenseHandle
from tests.later import Later

tensorboard = Later("tensorboard", "backend.event_processing.event_accumulator")
wandb = Later("wandb", "proto.wandb_internal_pb2")


def written(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard reads back."""
    events = tensorboard.backend.event_processing.event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_back_what_a_program_logged(tmp_path: Path) -> None:
    """Only processes show that values of steps that still run are written."""
    with monarch.log_to(tmp_path), Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, "[@data]")

        @monarch.program
        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x.sum()

        for at in range(20):
            x, total = step(x)
            monarch.log("total", total, at)
            monarch.log("half", at / 2)
        del x, total
    assert written(tmp_path, "total") == [(at, 4.0 * (at + 1)) for at in range(20)]
    assert written(tmp_path, "half") == [(at, at / 2) for at in range(20)]


def test_nothing_is_lost_at_the_end_of_a_program(tmp_path: Path) -> None:
    program = (
        "import torch, monarch\n"
        "from monarch.distributed import Mesh\n"
        "monarch.log_to('runs')\n"
        "mesh = Mesh(data=2)\n"
        "x = monarch.distribute(torch.arange(4.0), mesh, '[@data]')\n"
        "for step in range(5):\n"
        "    monarch.log('mean', (x * step).mean(), step)\n"
    )
    result = python.run("-c", program, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert (result.returncode, result.stderr) == (0, "")
    assert written(tmp_path / "runs", "mean") == [(step, 1.5 * step) for step in range(5)]


def records(path: Path) -> Iterator[Any]:
    """The records of a file of wandb's: LevelDB's log format behind seven bytes, here of one block."""
    data, at = path.read_bytes(), 7
    assert len(data) < 32 << 10
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1  # a whole record
        yield wandb.proto.wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length


@pytest.mark.full
def test_weights_and_biases_offline(tmp_path: Path) -> None:
    run = wandb.init(mode="offline", dir=tmp_path, project="monarch", settings=wandb.Settings(silent=True))
    with monarch.log_to(run):
        for step in range(3):
            monarch.log("loss", 1.0 / (1 + step), step)
            monarch.log("rate", torch.tensor(0.5), step)
    wandb.teardown()  # its service goes on writing the file until then
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    items = [item for record in records(path) for item in record.history.item]
    found = [(item.key or item.nested_key[0], item.value_json) for item in items]
    assert [float(value) for key, value in found if key == "loss"] == [1.0, 0.5, 1 / 3]
    assert [float(value) for key, value in found if key == "rate"] == [0.5] * 3


class Slow(DenseExecutor):
    """Workers whose values are there when `there` is set, and that are lost while `lost` is."""

    there = threading.Event()
    lost = threading.Event()

    def shards(
        self, handle: DenseHandle, workers: Sequence[int] | None = None, *, quiet: bool = False
    ) -> list[torch.Tensor]:
        if quiet:
            assert self.there.wait(60)
            if self.lost.is_set():
                raise DeviceMeshError("a worker has ended")
        return super().shards(handle, workers, quiet=quiet)


def test_a_call_does_not_wait_and_the_order_is_kept() -> None:
    Slow.there.clear()
    Slow.lost.clear()
    found: list[tuple[str, float, int]] = []
    with executors_by(Slow), Mesh(data=2) as mesh, monarch.log_to(lambda *value: found.append(value)) as log:
        monarch.log("sum", monarch.distribute(torch.tensor(2.0), mesh))
        monarch.log("plain", 3)
        monarch.log("sum", monarch.distribute(torch.tensor([4.0]), mesh))
        assert found == []  # the workers are not there yet, and nobody has waited
        Slow.there.set()
        log.flush()
        assert found == [("sum", 2.0, 0), ("plain", 3.0, 0), ("sum", 4.0, 1)]


def test_values_of_a_lost_mesh_are_written_once_it_is_healed(caplog: pytest.LogCaptureFixture) -> None:
    Slow.there.set()
    Slow.lost.set()
    found: list[tuple[str, float, int]] = []
    with executors_by(Slow), Mesh(data=2) as mesh, monarch.log_to(lambda *value: found.append(value)) as log:
        monarch.log("sum", monarch.distribute(torch.tensor(2.0), mesh))
        log.flush()
        assert found == [] and "1 logged values are not there yet, from 'sum' at step 0 on" in caplog.text
        Slow.lost.clear()
        monarch.log("plain", 1)
        log.flush()
    assert found == [("sum", 2.0, 0), ("plain", 1.0, 0)]


def test_a_failed_step_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Only workers fail so."""
    found: list[tuple[str, float, int]] = []
    with Mesh(data=2) as mesh, monarch.log_to(lambda *value: found.append(value)) as log:

        @monarch.program
        def row(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, at).sum()

        x = monarch.distribute(torch.ones(2), mesh)
        monarch.log("row", row(x, torch.tensor([1])))
        monarch.log("row", row(x, torch.tensor([7])))
        monarch.log("row", row(x, torch.tensor([0])))
        log.flush()
    assert found == [("row", 1.0, 0), ("row", 1.0, 2)]
    assert "'row' at step 1 is not logged: " in caplog.text


def test_what_a_writer_raises_is_raised_by_the_next_call() -> None:
    def full(name: str, value: float, step: int) -> None:
        raise OSError("the disk is full")

    log = monarch.log_to(full)
    monarch.log("loss", 1)
    with pytest.raises(OSError, match="the disk is full"):
        log.close()
    monarch.log("loss", 1)  # nobody is left who writes it


def test_what_is_no_number_is_said() -> None:
    with monarch.log_to(lambda *value: None), pytest.raises(MonarchError, match=r"'x' is \[2\], and one number"):
        monarch.log("x", torch.ones(2))
    with pytest.raises(MonarchError, match="nothing can be logged to a int"):
        monarch.log_to(3)

    @monarch.program
    def step(x: torch.Tensor) -> torch.Tensor:
        monarch.log("x", x.sum())
        return x

    with executors_by(DenseExecutor), Mesh(data=2) as mesh, pytest.raises(ProgramError, match="return it, and log it"):
        step(monarch.distribute(torch.ones(2), mesh))
