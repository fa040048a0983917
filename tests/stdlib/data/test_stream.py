"""Streams onto meshes: batches and layouts, reading ahead, epochs, positions, stalls, the end."""

from __future__ import annotations

import gc
import io
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow
import pytest
import torch

import monarch
from monarch.compiler.errors import DeviceMeshError, LayoutError, MonarchError
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.types import TensorType
from monarch.data import DataError, stream
from monarch.distributed import Mesh
from tests.language.dense import DenseExecutor

TABLE = pyarrow.table({"x": np.arange(100), "y": np.arange(300, dtype=np.float32).reshape(100, 3).tolist()})


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """A mesh of which this process holds everything."""
    with executors_by(DenseExecutor), Mesh(data=2, model=2) as made:
        yield made


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "monarch data"]


def test_batches_reach_the_workers_of_a_mesh_in_their_layout() -> None:
    """Only processes show what each worker has; the last batch is not divided by the mesh, and large ones go through
    the staging area."""
    rows = np.arange(70_000, dtype=np.float32).reshape(7, 10_000)
    with Mesh(data=2) as real, stream({"x": np.arange(7), "y": rows}, real, "[@data]", batch=4) as batches:
        first, last = batches
        assert str(first["y"].tensor_type) == "f32[4@data, 10000]"
        assert torch.equal(first["y"].to_local(data=1), torch.from_numpy(rows[2:4]))
        assert last["x"].full_tensor().tolist() == [4, 5, 6]
        assert last["x"].to_local(data=1).tolist() == [6]
        assert torch.equal(last["y"].full_tensor(), torch.from_numpy(rows[4:]))


def test_a_program_trains_from_a_stream_while_it_reads_ahead() -> None:
    """Only workers show that batches placed by the thread come before the steps that take them."""
    with Mesh(data=2) as real:
        total = monarch.distribute(torch.zeros(()), real)

        @monarch.program
        def add(x: torch.Tensor) -> torch.Tensor:
            total.add_(x.sum())
            return total.clone()

        values = torch.arange(64, dtype=torch.float32)
        for batch in stream(values, real, "[@data]", batch=4, epochs=3, shuffle=1):
            result = add(batch)
        assert result.item() == 3 * values.sum().item()


def test_layouts_by_column_and_by_position(mesh: Mesh) -> None:
    (batch,) = stream(TABLE, mesh, {"x": None, "y": "[@data, -]"}, batch=100)
    assert str(batch["x"].sharding) == "[-]" and str(batch["y"].sharding) == "[@data, -]"
    (pair,) = stream((np.arange(4), np.ones((4, 2))), mesh, ("[@data]", ["data", "model"]), batch=4)
    assert [str(each.sharding) for each in pair] == ["[@data]", "[@data, @model]"]
    (batch,) = stream(TABLE, mesh, ["data"], batch=100)
    assert str(batch["y"].sharding) == "[@data, -]"


def test_a_layout_that_does_not_fit_is_said_with_the_column(mesh: Mesh) -> None:
    with pytest.raises(LayoutError, match="no layout for column 'y'"):
        next(stream(TABLE, mesh, {"x": "[@data]"}, batch=10))
    with pytest.raises(LayoutError, match="'tp'"):
        next(stream(TABLE, mesh, "[@tp]", batch=10))
    with pytest.raises(LayoutError, match="column 'x'"):
        next(stream(TABLE, mesh, "[@data, @model]", batch=10))


def test_abstract_meshes_get_batches_without_data() -> None:
    batch = next(stream(TABLE, Mesh.abstract(data=8), "[@data]", batch=16))
    assert str(batch["x"].tensor_type) == "i64[16@data]"


def test_the_last_batch_is_kept_or_dropped() -> None:
    kept = stream(TABLE, None, batch=30)
    assert [len(batch["x"]) for batch in kept] == [30, 30, 30, 10] and len(kept) == 4
    dropped = stream(TABLE, None, batch=30, last="drop")
    assert [len(batch["x"]) for batch in dropped] == [30, 30, 30] and len(dropped) == 3
    with pytest.raises(DataError, match="no whole batch of 101 rows"):
        next(stream(TABLE, None, batch=101, last="drop"))
    with pytest.raises(DataError, match="an epoch of what <lambda>\\(\\) gives has no rows"):
        next(stream(lambda: iter(()), None, batch=1))


def test_each_for_goes_on_with_the_next_epochs() -> None:
    batches = stream(np.arange(50), None, batch=50, shuffle=1)
    epochs = [[batch.tolist() for batch in batches] for _ in range(3)]
    assert [len(each) for each in epochs] == [1, 1, 1] and batches.epoch == 3
    assert len({tuple(rows) for (rows,) in epochs}) == 3
    together = stream(np.arange(50), None, batch=50, shuffle=1, epochs=3)
    assert [batch.tolist() for batch in together] == [rows for (rows,) in epochs]
    endless = stream(np.arange(3), None, batch=3, epochs=None)
    assert [next(endless).tolist() for _ in range(4)] == [[0, 1, 2]] * 4
    endless.close()


@pytest.mark.parametrize("taken", range(9))
def test_a_stream_goes_on_anywhere_with_other_batches_on_another_mesh(taken: int, mesh: Mesh) -> None:
    whole = torch.cat(list(stream(np.arange(50), None, batch=50, shuffle=1, epochs=2)))
    first = stream(np.arange(50), None, batch=12, shuffle=1, epochs=2)
    given = [next(first) for _ in range(taken)]
    state = first.state_dict()
    first.close()
    rest = stream(np.arange(50), mesh, "[@data]", batch=7, shuffle=1, epochs=2)
    rest.load_state_dict(state)
    given += [batch.full_tensor() for batch in rest]
    assert torch.equal(torch.cat(given), whole)


def test_a_state_of_other_data_is_refused() -> None:
    state = stream(np.arange(50), None, batch=12, shuffle=1).state_dict()
    with pytest.raises(DataError, match="with seed 1, and this one, of arrays of 50 rows, has 2"):
        stream(np.arange(50), None, batch=12, shuffle=2).load_state_dict(state)
    with pytest.raises(DataError, match="with rows 50, and this one, of arrays of 51 rows, has 51"):
        stream(np.arange(51), None, batch=12, shuffle=1).load_state_dict(state)


def test_no_more_than_ahead_batches_are_read_before_they_are_asked_for() -> None:
    made: list[torch.Tensor] = []

    def noted(batch: torch.Tensor) -> torch.Tensor:
        made.append(batch)
        return batch

    batches = stream(np.arange(1000), None, batch=10, ahead=3, map=noted)
    next(batches)
    reader = batches._reader
    assert reader is not None
    with reader.changed:
        assert reader.changed.wait_for(lambda: len(reader.ready) == 3, 60)
        assert len(made) == 4
    batches.close()


def test_a_batch_is_given_when_its_rows_have_come() -> None:
    """Rows may come slowly, as from a queue: those of the next batches are not waited for."""
    more = threading.Event()

    def rows() -> Iterator[int]:
        yield from range(4)
        assert more.wait(30)
        yield from range(4, 8)

    with stream(rows, None, batch=4) as batches:
        assert next(batches).tolist() == [0, 1, 2, 3]
        more.set()
        assert [batch.tolist() for batch in batches] == [[4, 5, 6, 7]]


def test_a_source_that_stalls_is_named_with_how_long_and_where(caplog: pytest.LogCaptureFixture) -> None:
    gone_on = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            gone_on.set()

    def slow() -> Iterator[int]:
        yield 1
        gone_on.wait(60)
        yield 2

    handler = Heard()
    logging.getLogger("monarch.data").addHandler(handler)
    try:
        with monarch.configured(stall_warning="100ms"), stream(slow, None, batch=2) as batches:
            assert next(batches).tolist() == [1, 2]
            assert batches.waited >= 0.1
    finally:
        logging.getLogger("monarch.data").removeHandler(handler)
    assert caplog.messages[0].startswith("no batch for 0.1")
    assert "what slow() gives is read (row 0), at " in caplog.messages[0]


def test_closing_leaves_no_thread_and_a_closed_stream_goes_on() -> None:
    closed = threading.Event()

    def rows() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.set()

    batches = stream(rows, None, batch=256)
    next(batches)
    assert threads()
    batches.close()
    assert not threads() and closed.is_set()
    assert next(batches)[0] == 256
    with batches:
        pass
    assert not threads()


def test_a_program_ends_though_its_source_stalls() -> None:
    """It waited ten seconds for the source, and then said that it still reads. Only a process has an end."""
    program = (
        "import threading, torch; from monarch.data import stream\n"
        "def rows():\n    yield 1\n    threading.Event().wait()\n"
        "batches = stream(rows, None, batch=1); print(next(batches))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "tensor([1])\n", "")


def test_a_stream_that_nobody_has_ends_its_thread() -> None:
    batches = stream(np.arange(1000), None, batch=1)
    next(batches)
    del batches
    gc.collect()
    assert not threads()


def test_a_batch_that_a_lost_mesh_refuses_is_given_when_it_is_healed() -> None:
    lost = threading.Event()

    class Losing(DenseExecutor):
        def put(self, tensor: torch.Tensor, type: TensorType, lent: bool = False) -> Any:
            if lost.is_set():
                raise DeviceMeshError("a worker has ended")
            return super().put(tensor, type, lent)

    with executors_by(Losing), Mesh(data=2) as mesh, stream(iter(range(8)), mesh, "[@data]", batch=2) as batches:
        found = [next(batches).tolist()]
        lost.set()
        with pytest.raises(DeviceMeshError):
            found += (next(batches).tolist() for _ in range(4))  # two may have been placed before
        with pytest.raises(DeviceMeshError):
            next(batches)
        lost.clear()
        found += [batch.tolist() for batch in batches]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_closed_mesh_is_said() -> None:
    with executors_by(DenseExecutor), Mesh(data=2) as gone:
        pass
    with pytest.raises(MonarchError, match="the mesh is closed"):
        next(stream(TABLE, gone, "[@data]", batch=4))


@pytest.mark.parametrize("option", ["window", "ahead", "epochs", "batch"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(DataError):
        stream(TABLE, None, **{"batch": 4, option: 0})
    with pytest.raises(DataError, match="'keep' or 'drop'"):
        stream(TABLE, None, batch=4, last="pad")  # type: ignore[arg-type]


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    list(stream(TABLE, None, batch=10))
    text = terminal.getvalue()
    assert text.startswith("\r\x1b[2Kepoch 1/1 · batch 1/10 · ") and text.count("\n") == 1 and text.endswith(" s\n")
    assert "epoch 1/1 done · " in text.rpartition("\r")[2]


def test_a_pipe_gets_nothing_unless_asked_and_few_lines_then(capsys: pytest.CaptureFixture[str]) -> None:
    list(stream(TABLE, None, batch=1))
    assert capsys.readouterr().err == ""
    list(stream(TABLE, None, batch=1, progress=True))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("epoch 1/1 · batch 1/100 · ") and " rows/s · waited " in lines[1]


def test_none_of_the_engines_is_imported_with_monarch() -> None:
    program = (
        "import sys, monarch, monarch.data\n"
        "engines = {'pyarrow', 'polars', 'duckdb', 'ibis', 'datasets', 'pandas'}\n"
        "print(sorted(engines & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr
