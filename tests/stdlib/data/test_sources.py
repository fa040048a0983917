"""Each engine gives its rows, in order and shuffled, whole and from any row on; Arrow's memory is not copied."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from monarch.compiler.execution.factories import executors_by
from monarch.compiler.types import TensorType
from monarch.data import DataError, Ragged, query, stream
from monarch.distributed import Mesh
from tests.language.dense import DenseExecutor
from tests.later import Later

datasets, duckdb, ibis, polars = map(Later, ("datasets", "duckdb", "ibis", "polars"))
pyarrow = Later("pyarrow", "compute", "dataset", "parquet")

ROWS = 203


@cache
def table() -> Any:
    return pyarrow.table({"x": np.arange(ROWS), "y": np.arange(ROWS, dtype=np.float32) * 0.5})


class Squares(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": row, "y": row * 0.5}


class Counted(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"x": row, "y": row * 0.5} for row in range(ROWS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files: three, of several row groups each."""
    made = tmp_path_factory.mktemp("parquet")
    for number, start in enumerate((0, 90, 150)):
        stop = (90, 150, ROWS)[number]
        pyarrow.parquet.write_table(table().slice(start, stop - start), made / f"{number}.parquet", row_group_size=25)
    return made


def ibis_table(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of ibis' own calls of DuckDB
        return ibis.duckdb.connect().read_parquet(f"{folder}/*.parquet").order_by("x")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "arrow table": lambda _: table(),
    "arrow table of chunks": lambda _: pyarrow.concat_tables([table().slice(0, 10), table().slice(10)]),
    "arrow batch": lambda _: table().combine_chunks().to_batches()[0],
    "arrow data set": lambda folder: pyarrow.dataset.dataset(folder),
    "arrow data set with a filter": lambda _: pyarrow.dataset.dataset(
        pyarrow.table({"x": np.arange(2 * ROWS), "y": np.arange(2 * ROWS, dtype=np.float32) * 0.5})
    ).filter(pyarrow.compute.field("x") < ROWS),
    "arrow data set in memory": lambda _: pyarrow.dataset.dataset(table()),
    "parquet folder": lambda folder: folder,
    "parquet glob": lambda folder: f"{folder}/*.parquet",
    "parquet files": lambda folder: sorted(folder.iterdir()),
    "polars frame": lambda _: polars.from_arrow(table()),
    "polars lazy frame": lambda folder: polars.scan_parquet(folder),
    "duckdb relation": lambda folder: duckdb.connect().sql(f"SELECT * FROM '{folder}/*.parquet' ORDER BY x"),
    "duckdb query": lambda folder: query(f"SELECT * FROM '{folder}/*.parquet' ORDER BY x"),
    "ibis": ibis_table,
    "arrays": lambda _: {"x": np.arange(ROWS), "y": np.arange(ROWS, dtype=np.float32) * 0.5},
    "tensors": lambda _: {"x": torch.arange(ROWS), "y": torch.arange(ROWS) * 0.5},
    "hugging face": lambda _: datasets.Dataset(table()),
    "hugging face with a transform": lambda _: datasets.Dataset(table()).with_transform(dict),
    "hugging face iterable": lambda _: datasets.Dataset(table()).to_iterable_dataset(),
    "map style": lambda _: Squares(),
    "iterable data set": lambda _: Counted(),
    "list of dicts": lambda _: [{"x": row, "y": row * 0.5} for row in range(ROWS)],
    "function": lambda _: lambda: ({"x": row, "y": row * 0.5} for row in range(ROWS)),
}


def rows(batches: Any) -> tuple[list[int], list[float]]:
    found = list(batches)
    return (
        torch.cat([batch["x"] for batch in found]).tolist(),
        torch.cat([batch["y"] for batch in found]).tolist(),
    )


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ibis")
def test_a_source_gives_its_rows_in_order_shuffled_and_from_any_row_on(name: str, folder: Path) -> None:
    source = SOURCES[name](folder)
    xs, ys = rows(stream(source, None, batch=32))
    assert xs == list(range(ROWS)) and ys == [x * 0.5 for x in xs]
    xs, ys = rows(stream(source, None, batch=32, shuffle=7, window=40))
    assert sorted(xs) == list(range(ROWS)) and xs != list(range(ROWS)) and ys == [x * 0.5 for x in xs]
    assert rows(stream(source, None, batch=50, shuffle=7, window=40))[0] == xs  # whatever the batches
    batches = stream(source, None, batch=32, shuffle=7, window=40)
    taken = [next(batches) for _ in range(3)]
    state = batches.state_dict()
    batches.close()
    assert torch.cat([batch["x"] for batch in taken]).tolist() == xs[:96]
    again = stream(source, None, batch=13, shuffle=7, window=40)
    again.load_state_dict(state)
    assert rows(again)[0] == xs[96:]


@pytest.mark.parametrize(
    "name", ["arrow table", "parquet folder", "polars frame", "hugging face", "arrays", "map style"]
)
def test_columns_are_chosen(name: str, folder: Path) -> None:
    for batch in stream(SOURCES[name](folder), None, batch=64, columns=["y"]):
        assert list(batch) == ["y"]
    with pytest.raises(DataError, match="there is no column 'z'"):
        next(stream(SOURCES[name](folder), None, batch=64, columns=["y", "z"]))


def test_a_reader_is_read_once() -> None:
    reader = table().to_reader(max_chunksize=20)
    batches = stream(reader, None, batch=50)
    assert rows(batches)[0] == list(range(ROWS))
    with pytest.raises(DataError, match="can be read once"):
        next(iter(batches))


def test_a_function_gives_an_arrow_reader_for_each_epoch() -> None:
    table = pyarrow.table({"x": range(20), "y": range(20)})
    with stream(lambda: table.to_reader(7), None, batch=8, epochs=2, columns=["x"]) as batches:
        found = [batch["x"].tolist() for batch in batches]
    assert found == [list(range(8)), list(range(8, 16)), list(range(16, 20))] * 2


def test_rows_are_tuples_and_single_values_as_the_source_has_them() -> None:
    pairs = stream([(row, [row, row + 1]) for row in range(5)], None, batch=5)
    (batch,) = pairs
    assert isinstance(batch, tuple) and batch[1].tolist() == [[row, row + 1] for row in range(5)]
    (batch,) = stream(np.arange(5), None, batch=5)
    assert torch.equal(batch, torch.arange(5))
    (batch,) = stream(TensorDataset(torch.arange(5), torch.ones(5, 2)), None, batch=5)
    assert torch.equal(batch[0], torch.arange(5)) and batch[1].shape == (5, 2)
    (batch,) = stream((np.arange(5), np.ones((5, 3))), None, batch=5)
    assert batch[1].shape == (5, 3)


# -- memory ------------------------------------------------------------------------------------------------------------


def tensors_given(source: Any, batch: int) -> list[list[torch.Tensor]]:
    """What a stream hands to the mesh's executor, by batch."""
    given: list[torch.Tensor] = []

    class Recording(DenseExecutor):
        def put(self, tensor: torch.Tensor, type: TensorType, lent: bool = False) -> Any:
            assert lent
            given.append(tensor)
            return super().put(tensor, type, lent)

    with executors_by(Recording), Mesh(data=2) as mesh:
        columns = len(list(stream(source, mesh, "[@data]", batch=batch))[0])
    return [given[start : start + columns] for start in range(0, len(given), columns)]


def test_arrow_memory_is_handed_to_the_mesh_without_a_copy() -> None:
    table = pyarrow.table(
        {
            "flat": np.arange(100, dtype=np.float32),
            "rows": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.arange(300, dtype=np.int64)), 3),
            "lists": pyarrow.array([[row, row] for row in range(100)], pyarrow.list_(pyarrow.int32())),
        }
    )
    flat = table["flat"].chunk(0).buffers()[1].address
    fixed = table["rows"].chunk(0).values.buffers()[1].address
    lists = table["lists"].chunk(0).values.buffers()[1].address
    for number, batch in enumerate(tensors_given(table, batch=20)):
        assert batch[0].data_ptr() == flat + number * 20 * 4
        assert batch[1].data_ptr() == fixed + number * 20 * 3 * 8 and batch[1].shape == (20, 3)
        assert batch[2].data_ptr() == lists + number * 20 * 2 * 4 and batch[2].shape == (20, 2)


def test_a_memory_map_is_handed_to_the_mesh_without_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(200).reshape(100, 2))
    mapped = np.load(path, mmap_mode="r")
    for number, batch in enumerate(tensors_given({"x": mapped}, batch=25)):
        assert batch[0].data_ptr() == mapped.ctypes.data + number * 25 * 16


def test_memory_that_its_owner_may_change_is_copied() -> None:
    for source in (np.arange(10), torch.arange(10)):
        address = source.ctypes.data if isinstance(source, np.ndarray) else source.data_ptr()
        (batch,) = tensors_given({"x": source}, batch=10)
        assert batch[0].data_ptr() != address and torch.equal(batch[0], torch.arange(10))


def test_map_gets_copies_that_it_may_change(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones(8))
    mapped = np.load(path, mmap_mode="r")
    (batch,) = stream(mapped, None, batch=8, map=lambda x: x.add_(1))
    assert batch.tolist() == [2.0] * 8 and mapped.tolist() == [1.0] * 8
    plain = stream(mapped, None, batch=8)
    next(plain).zero_()
    assert mapped.tolist() == [1.0] * 8


# -- dtypes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (lambda: pyarrow.array([True, False]), torch.bool),
        (lambda: pyarrow.array([1, 2], pyarrow.uint8()), torch.uint8),
        (lambda: pyarrow.array([1, 2], pyarrow.uint16()), torch.int32),
        (lambda: pyarrow.array([1, 2], pyarrow.uint32()), torch.int64),
        (lambda: pyarrow.array([1, 2], pyarrow.uint64()), torch.int64),
        (lambda: pyarrow.array(np.array([1, 2], np.float16)), torch.float16),
        (lambda: pyarrow.array(["a", "b"]).dictionary_encode().indices, torch.int32),
        (lambda: pyarrow.array([3, 4, 3]).dictionary_encode(), torch.int64),
    ],
)
def test_dtypes_of_arrow(array: Callable[[], Any], dtype: torch.dtype) -> None:
    values = array()
    (batch,) = stream(pyarrow.table({"x": values}), None, batch=len(values))
    assert batch["x"].dtype == dtype and batch["x"].tolist() == values.to_pylist()


def test_tensors_of_arrow_keep_their_shape() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    table = pyarrow.table({"x": pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values)})
    found = torch.cat([batch["x"] for batch in stream(table, None, batch=3)])
    assert np.array_equal(found.numpy(), values)


def test_lists_of_lists_become_tensors_as_the_error_says() -> None:
    rows = [{"x": [[1.5, 2.0], [3.0, 4.0]]}] * 3
    with pytest.raises(DataError) as raised:
        next(stream(rows, None, batch=3))
    function = (raised.value.hint or "").partition("map=")[2].removesuffix(".")
    found = next(stream(rows, None, batch=3, map=eval(function, {"torch": torch})))
    assert found["x"].tolist() == [row["x"] for row in rows]


def test_a_query_of_what_is_registered_says_to_give_a_relation() -> None:
    connection = duckdb.connect()
    connection.register("rows", pyarrow.table({"x": [1, 2, 3]}))
    with pytest.raises(DataError, match=r"stream\(connection.sql"):
        next(stream(query("SELECT * FROM rows", connection), None, batch=3))
    assert next(stream(connection.sql("SELECT * FROM rows"), None, batch=3))["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (lambda: pyarrow.array([1, None, 3]), "column 'x' has 1 nulls, the first in row 1"),
        (lambda: pyarrow.array(["a", "b"]), "column 'x' holds str values, which are no tensors"),
        (lambda: pyarrow.array([[1], [1, 2]]), "the rows of column 'x' have 1 to 2 elements"),
        (lambda: pyarrow.array([1, 2], pyarrow.timestamp("s")), "is of type timestamp"),
        (lambda: pyarrow.array([2**63], pyarrow.uint64()), "2\\*\\*63"),
    ],
)
def test_what_cannot_be_a_tensor_is_said(array: Callable[[], Any], what: str) -> None:
    with pytest.raises(DataError, match=what):
        next(stream(pyarrow.table({"x": array()}), None, batch=4))


def test_text_and_rows_of_different_lengths_go_through_map() -> None:
    table = pyarrow.table({"text": ["ab", "c", "def"], "ids": [[1, 2], [3], []]})

    def numbers(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        assert isinstance(batch["ids"], Ragged)
        return {"lengths": torch.tensor([len(text) for text in batch["text"]]), "ids": batch["ids"].pad(3, -1)}

    (batch,) = stream(table, None, batch=3, map=numbers)
    assert batch["lengths"].tolist() == [2, 1, 3] and batch["ids"].tolist() == [[1, 2, -1], [3, -1, -1], [-1, -1, -1]]


# -- errors ------------------------------------------------------------------------------------------------------------


class Broken(Squares):
    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == 70:
            raise ValueError("this image is no image")
        return super().__getitem__(row)


def test_the_row_that_cannot_be_read_is_named_where_its_batch_would_be_given() -> None:
    batches = stream(Broken(), None, batch=32)
    assert [next(batches)["x"][0].item() for _ in range(2)] == [0, 32]
    with pytest.raises(DataError, match="row 70 of the data set Broken: ValueError: this image is no image"):
        next(batches)


def test_an_iterable_names_the_row_too() -> None:
    def rows() -> Iterator[int]:
        yield from range(10)
        raise OSError("the disk is gone")

    with pytest.raises(DataError, match="row 10 of what rows\\(\\) gives: OSError: the disk is gone"):
        list(stream(rows, None, batch=5))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"x": np.random.default_rng(0).random(10_000)}), path, row_group_size=1000
    )
    batches = stream(path, None, batch=1000)
    data = bytearray(path.read_bytes())
    data[4:70_000] = bytes(len(data[4:70_000]))  # but not its footer
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"cannot read row group \\d of {re.escape(str(path))}"):
        list(batches)
    with pytest.raises(DataError, match="there is no file .*missing"):
        stream(tmp_path / "missing.parquet", None, batch=3)
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot open the Parquet file"):
        stream(path, None, batch=3)


def test_what_is_no_source_is_said() -> None:
    with pytest.raises(DataError, match="a int is no source of data"):
        stream(3, None, batch=1)
    with pytest.raises(DataError, match="arrays of different lengths"):
        stream({"x": np.arange(3), "y": np.arange(4)}, None, batch=1)
    for number in (np.array(3), torch.tensor(3)):
        with pytest.raises(DataError, match="is no source of data"):
            stream(number, None, batch=1)
