"""Sources from users' data: Arrow, Parquet, Polars, DuckDB, Ibis, NumPy, PyTorch, Hugging Face, plain iterables.

An engine is recognised by its classes' names, so that none is imported that the program does not use.
"""

from __future__ import annotations

import glob
import inspect
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from monarch.compiler.loading import load
from monarch.stdlib.data.arrow import from_array, from_arrow
from monarch.stdlib.data.columns import Columns, DataError, collate
from monarch.stdlib.data.order import Order, key_of
from monarch.stdlib.data.sources import Batched, Grouped, RandomAccess, RowGroup, Sequential, Source, parts_of_rows

_ROWS = 8192
"""So many rows an engine is asked for at once."""
_FEW = 256
"""So many rows that come one by one are made columns at once, unless fewer are waited for."""


@dataclass(frozen=True)
class Query:
    """SQL that DuckDB runs anew for each epoch."""

    sql: str
    connection: Any


def query(sql: str, connection: Any = None) -> Query:
    """A DuckDB query as a source, on a cursor of its own, so that the connection stays free for others:

        stream(monarch.data.query("SELECT x, y FROM 'train/*.parquet' ORDER BY id", connection), mesh, …)

    Without a connection it runs in a database in memory. The order of a stream is that of the query's rows: say ORDER
    BY where the query has none of its own, as one that groups or joins.
    """
    return Query(sql, connection)


def as_source(given: Any, columns: Sequence[str] | None) -> Source:
    """The source for a user's object. Raises DataError where there is none."""
    if isinstance(given, Source):
        return given
    for recognised, made in _KINDS:
        if recognised(given):
            return made(given, columns)
    if splits := [name for name in given if isinstance(name, str)] if isinstance(given, Mapping) else []:
        one = f"of {', '.join(map(repr, splits[:8]))}"
        raise DataError(
            f"a {type(given).__qualname__} {one} is no source of data",
            hint="give a split of it, as data['train'], or where it has columns NumPy arrays or tensors: "
            "{name: numpy.array(values), …}.",
        )
    raise DataError(
        f"a {type(given).__qualname__} is no source of data",
        hint="give a Parquet file, glob or folder, an Arrow, Polars, DuckDB or Ibis table, NumPy arrays, a data set of "
        "PyTorch's or Hugging Face's,\na DataLoader, an iterable of rows, or a function that returns one.",
    )


def _of(module: str, *names: str) -> Callable[[Any], bool]:
    def recognised(given: Any) -> bool:
        return any(
            kind.__module__.partition(".")[0] == module and kind.__name__ in names for kind in type(given).__mro__
        )

    return recognised


def _check(known: Iterable[Any], columns: Sequence[str] | None) -> None:
    """Raise DataError where the source has not all columns that are to be read."""
    for name in columns or ():
        if name not in (names := list(known)):
            hint = f"there are {', '.join(map(repr, names))}."
            if all(isinstance(each, int) for each in names):
                hint = f"a row that is a list or a tuple has a column for each value. Give dicts: {{{name!r}: row}}."
            raise DataError(f"there is no column {name!r}", hint=hint)


# -- Arrow -------------------------------------------------------------------------------------------------------------


class _Table(RandomAccess):
    """A table in memory."""

    def __init__(self, name: str, table: Any, columns: Sequence[str] | None) -> None:
        _check(table.schema.names, columns)
        self.name, self.length = name, table.num_rows
        self._table = table if columns is None else table.select(list(columns))

    def take(self, rows: slice | np.ndarray, order: Order) -> Columns:
        if isinstance(rows, slice):
            return from_arrow(self._table.slice(rows.start, rows.stop - rows.start), rows.start)
        return from_arrow(self._table.take(load("pyarrow").array(rows)))


def _arrow_table(given: Any, columns: Sequence[str] | None) -> Source:
    table = given if hasattr(given, "combine_chunks") else load("pyarrow").Table.from_batches([given])
    return _Table(f"an Arrow table of {table.num_rows:,} rows", table, columns)


def _reader(
    name: str, opened: Callable[[], Any], columns: Sequence[str] | None, length: int | None = None, once: bool = False
) -> Source:
    """Gives a pyarrow RecordBatchReader for each epoch."""

    return Sequential(name, lambda _, __: _parts_of_reader(opened(), columns), length, once)


def _parts_of_reader(reader: Any, columns: Sequence[str] | None) -> Generator[Columns]:
    row = 0
    try:
        _check(reader.schema.names, columns)
        for batch in reader:
            yield from_arrow(batch if columns is None else batch.select(list(columns)), row)
            row += batch.num_rows
    finally:
        reader.close()


_is_reader = _of("pyarrow", "RecordBatchReader")


def _arrow_dataset(given: Any, columns: Sequence[str] | None, name: str = "") -> Source:
    _check(given.schema.names, columns)
    chosen = None if columns is None else list(columns)
    try:
        fragments = list(given.get_fragments())
    except ValueError:  # a filter stands before them
        scanned: Callable[[], Any] = lambda: given.scanner(columns=chosen).to_reader()  # noqa: E731
        return _reader("a filtered Arrow data set", scanned, None)
    groups: list[RowGroup] = []
    for fragment in fragments:
        for part in fragment.split_by_row_group() if hasattr(fragment, "split_by_row_group") else [fragment]:

            def read(part: Any = part) -> Any:
                return part.to_table(columns=chosen, schema=given.schema)

            if hasattr(part, "row_groups"):
                info = part.row_groups[0]
                groups.append(RowGroup(f"row group {info.id} of {part.path}", info.num_rows, read))
            else:
                groups.append(RowGroup(getattr(part, "path", "a fragment"), part.count_rows(), read))
    return Grouped(name or f"an Arrow data set of {sum(group.rows for group in groups):,} rows", groups)


def _is_parquet(given: Any) -> bool:
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(each, (str, os.PathLike)) for each in given)
    return isinstance(given, (str, os.PathLike))


def _parquet(given: Any, columns: Sequence[str] | None) -> Source:
    paths: list[str] = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        path = os.fspath(each)
        found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        if not found or not all(map(os.path.exists, found)):
            raise DataError(f"there is no file {path}", hint="give a Parquet file, a glob of them, or a folder.")
        paths += found
    where: Any = paths[0] if len(paths) == 1 and Path(paths[0]).is_dir() else paths
    name = f"the Parquet files {given}" if len(paths) > 1 or where is not paths else f"the Parquet file {paths[0]}"
    try:
        opened = load("pyarrow.dataset").dataset(where, format="parquet", partitioning="hive")
        return _arrow_dataset(opened, columns, name)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these
        raise DataError(f"cannot open {name}: {error}", hint=_no_parquet(paths)) from error


def _no_parquet(paths: Sequence[str]) -> str:
    """How files of another format are read, where their names say which."""
    for path in paths:
        suffix = Path(path).suffix
        if suffix in (".csv", ".json", ".jsonl", ".tsv"):
            return f"of {suffix} files give a query: stream(monarch.data.query(\"SELECT * FROM '{path}'\"), mesh, …)."
    return ""


# -- engines of queries ------------------------------------------------------------------------------------------------


def _polars(given: Any, columns: Sequence[str] | None) -> Source:
    frame = given.collect() if hasattr(given, "collect") else given
    return _Table(f"a Polars frame of {frame.height:,} rows", frame.to_arrow(), columns)


def _duckdb_relation(given: Any, columns: Sequence[str] | None) -> Source:
    return _reader("a DuckDB relation", lambda: given.to_arrow_reader(_ROWS), columns)


def _duckdb_query(given: Query, columns: Sequence[str] | None) -> Source:
    def opened() -> Any:
        duckdb = load("duckdb")
        cursor = duckdb.connect() if given.connection is None else given.connection.cursor()
        try:
            return cursor.execute(given.sql).to_arrow_reader(_ROWS)
        except duckdb.CatalogException as error:
            raise DataError(
                str(error),
                hint="the query has a cursor of its own: what is registered, or temporary, is the connection's alone. "
                'Give a relation:\nstream(connection.sql("SELECT …"), mesh, …)',
            ) from error

    return _reader(f"the DuckDB query {_short(given.sql)!r}", opened, columns)


def _ibis(given: Any, columns: Sequence[str] | None) -> Source:
    return _reader("an Ibis table", lambda: given.to_pyarrow_batches(chunk_size=_ROWS), columns)


def _short(sql: str) -> str:
    line = " ".join(sql.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


# -- arrays ------------------------------------------------------------------------------------------------------------


class _Arrays(RandomAccess):
    def __init__(self, name: str, arrays: Mapping[Any, Any]) -> None:
        lengths = {key: len(array) for key, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"arrays of different lengths: {lengths}", hint="give arrays with a row for each example.")
        self._arrays, self.length = arrays, next(iter(lengths.values()))
        self.name = f"{name} of {self.length:,} rows"

    def take(self, rows: slice | np.ndarray, order: Order) -> Columns:
        own = not isinstance(rows, slice)
        found: Columns = {}
        for key, array in self._arrays.items():
            if isinstance(array, torch.Tensor):
                part = array.detach()[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
                found[key] = part if own else part.clone()
            else:
                found[key] = from_array(array[rows], own)
        return found


def _is_array(given: Any) -> bool:
    return isinstance(given, (np.ndarray, torch.Tensor)) and given.ndim > 0


def _is_arrays(given: Any) -> bool:
    values = list(given.values()) if isinstance(given, Mapping) else given if isinstance(given, tuple) else []
    return bool(values) and all(map(_is_array, values))


def _arrays(given: Any, columns: Sequence[str] | None) -> Source:
    if isinstance(given, Mapping):
        return _Arrays("arrays", _chosen(dict(given), columns))
    if isinstance(given, tuple):
        return _Arrays("arrays", _chosen(dict(enumerate(given)), columns))
    return _Arrays("arrays", _chosen({None: given}, columns))


# -- pandas ------------------------------------------------------------------------------------------------------------


def _pandas(given: Any, columns: Sequence[str] | None) -> Source:
    table = load("pyarrow").Table.from_pandas(given, preserve_index=False)
    return _Table(f"a pandas frame of {table.num_rows:,} rows", table, columns)


def _series(given: Any, columns: Sequence[str] | None) -> Source:
    return _Arrays("a pandas series", _chosen({None: given.to_numpy()}, columns))  # by place, not by its index


# -- PyTorch and Hugging Face ------------------------------------------------------------------------------------------


class _MapStyle(RandomAccess):
    """A data set of PyTorch's that gives a row by its number."""

    def __init__(self, given: Any, columns: Sequence[str] | None) -> None:
        self.name, self.length = f"the data set {type(given).__qualname__}", len(given)
        self._given, self._columns = given, columns
        self.draws = type(given) not in (list, tuple)
        self._drawing = False
        """Whether a call for several rows has drawn random numbers: rows are asked for one by one then, each with its
        own."""

    def take(self, rows: slice | np.ndarray, order: Order) -> Columns:
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        if not self.draws:
            return _chosen(collate([self._given[number] for number in numbers], self._columns), self._columns)
        several = getattr(self._given, "__getitems__", None)
        with order.draws(numbers[0]) as draws:
            if several is not None and not self._drawing:
                found = several(list(numbers))
                self._drawing = draws.drawn
            if several is None or self._drawing:
                found = []
                for number in numbers:
                    draws.at(number)
                    with self.reading(f"row {number:,}"):
                        found += [self._given[number]] if several is None else several([number])
        return _chosen(collate(found, self._columns), self._columns)


class _HuggingFace(RandomAccess):
    def __init__(self, given: Any, columns: list[str]) -> None:
        self.name, self.length = f"a Hugging Face data set of {len(given):,} rows", len(given)
        self._given = given.select_columns(columns).with_format("arrow")

    def take(self, rows: slice | np.ndarray, order: Order) -> Columns:
        first = rows.start if isinstance(rows, slice) else 0
        return from_arrow(self._given[rows if isinstance(rows, slice) else rows.tolist()], first)


def _hugging_face(given: Any, columns: Sequence[str] | None) -> Source:
    if given.format["type"] == "custom":  # a function of the user's makes its rows
        return _MapStyle(given, columns)
    _check(given.column_names, columns)
    read = list(columns or given.format["columns"])  # with_format(…, columns=…) leaves some out
    if any(
        hasattr(given.features[name], "decode_example") for name in read
    ):  # images, sound: as the data set gives them
        return _MapStyle(given.select_columns(read), None)
    return _HuggingFace(given, read)


def _map_style(given: Any, columns: Sequence[str] | None) -> Source:
    if isinstance(given, TensorDataset):
        return _arrays(given.tensors, columns)
    return _MapStyle(given, columns)


def _loader(given: Any, columns: Sequence[str] | None) -> Source:
    samplers = [given.sampler, given.batch_sampler, getattr(given.batch_sampler, "sampler", None)]
    random = [each for each in samplers if hasattr(each, "generator")]  # PyTorch's that draw, and torchdata's
    drawing = [given, *random]
    made = [each.generator for each in drawing]

    def batches(order: Order) -> Iterator[Columns]:
        generator = torch.Generator().manual_seed(int(key_of(order.drawn, order.epoch)) >> 1)
        for each, former in zip(drawing, made, strict=True):
            if order.seed is not None or former is None:
                each.generator = generator
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(order.epoch)
        iterator = iter(given)
        try:
            for batch in iterator:
                yield _chosen(_as_columns(batch), columns)
        finally:
            if given.num_workers and not given.persistent_workers:
                iterator._shutdown_workers()  # as its deletion would, but now
            for each, former in zip(drawing, made, strict=True):
                each.generator = former

    try:
        length = len(given)
    except TypeError:  # of an iterable data set without a length
        length = None
    source = Batched(
        f"a DataLoader of {type(given.dataset).__qualname__}", batches, length, draws=not given.num_workers
    )
    source.repeats = not random
    return source


def _as_columns(batch: Any) -> Columns:
    """A batch of a DataLoader's."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple) or (isinstance(batch, list) and any(isinstance(each, torch.Tensor) for each in batch)):
        return dict(enumerate(batch))
    return {None: batch}


def _hugging_face_iterable(given: Any, columns: Sequence[str] | None) -> Source:
    return _iterated("an iterable Hugging Face data set", lambda epoch: _at_epoch(given, epoch), columns)


def _at_epoch(given: Any, epoch: int) -> Any:
    if hasattr(given, "set_epoch"):
        given.set_epoch(epoch)
    return given


def _iterated(
    name: str, made: Callable[[int], Iterable[Any]], columns: Sequence[str] | None, once: bool = False
) -> Source:
    def parts(epoch: int, size: int) -> Iterator[Columns]:
        rows = made(epoch)
        if _is_reader(rows):
            return _parts_of_reader(rows, columns)
        return (_chosen(part, columns) for part in parts_of_rows(rows, min(size, _FEW), columns))

    return Sequential(name, parts, None, once, draws=True)


def _chosen(found: Columns, columns: Sequence[str] | None) -> Columns:
    if list(found) == [None]:  # rows are single values: `stream` refuses columns of them, `pack` takes them
        return found
    _check(found, columns)
    return found if columns is None else {name: found[name] for name in columns}


def _function(given: Any, columns: Sequence[str] | None) -> Source:
    takes_epoch = len(inspect.signature(given).parameters) == 1
    name = f"what {getattr(given, '__name__', 'the function')}() gives"
    return _iterated(name, lambda epoch: given(epoch) if takes_epoch else given(), columns)


def _iterable(given: Any, columns: Sequence[str] | None) -> Source:
    once = isinstance(given, Iterator)
    what = "an iterator" if once else "an iterable"
    return _iterated(f"{what} ({type(given).__qualname__})", lambda epoch: _at_epoch(given, epoch), columns, once)


_Maker = Callable[[Any, Sequence[str] | None], Source]
_KINDS: list[tuple[Callable[[Any], bool], _Maker]] = [
    (_is_parquet, _parquet),
    (_of("pyarrow", "Table", "RecordBatch"), _arrow_table),
    (_of("pyarrow", "Dataset"), _arrow_dataset),
    (
        _is_reader,
        lambda given, columns: _reader("an Arrow reader", lambda: given, columns, once=True),
    ),
    (_of("polars", "DataFrame", "LazyFrame"), _polars),
    (lambda given: isinstance(given, Query), _duckdb_query),
    (_of("duckdb", "DuckDBPyRelation"), _duckdb_relation),
    (_of("_duckdb", "DuckDBPyRelation"), _duckdb_relation),
    (_of("ibis", "Table"), _ibis),
    (_of("pandas", "DataFrame"), _pandas),
    (_of("pandas", "Series"), _series),
    (_of("datasets", "Dataset"), _hugging_face),
    (_of("datasets", "IterableDataset"), _hugging_face_iterable),
    (lambda given: isinstance(given, DataLoader), _loader),
    (lambda given: isinstance(given, IterableDataset), _iterable),
    (lambda given: isinstance(given, Dataset), _map_style),
    (_is_array, _arrays),
    (_is_arrays, _arrays),
    (lambda given: hasattr(given, "__len__") and hasattr(given, "__getitem__") and not _is_single(given), _map_style),
    (lambda given: isinstance(given, Iterable) and not _is_single(given), _iterable),
    (callable, _function),
]


def _is_single(given: Any) -> bool:
    """It looks like rows, and has none: a dict, an array without dims."""
    return isinstance(given, (Mapping, np.ndarray, torch.Tensor))
