"""`monarch.data.stream`: batches of a source, on a mesh, read ahead.

A thread reads rows in the order of the epoch (`sources`), makes batches of them, and hands each worker's blocks to the
mesh's shared memory, a bounded number of batches before they are asked for. Memory that a source lends, as Arrow does,
is copied once, by the thread, into that shared memory. Nobody writes to it before: batches that a function of the
user's gets are copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from monarch.compiler.errors import DeviceMeshError, LayoutError
from monarch.compiler.errors import Source as Line
from monarch.compiler.text.parse import parse_layout
from monarch.compiler.types import Layout, TensorType
from monarch.language.layouts import LayoutLike, as_layout
from monarch.language.placing.distribute import check_mesh
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.plain import of_handle, put
from monarch.runtime.controller.steps import RemoteTensor
from monarch.stdlib.data.arrow import from_array
from monarch.stdlib.data.columns import (
    Column,
    Columns,
    DataError,
    Ragged,
    as_tensor,
    called,
    cut,
    join,
    rows_of,
    shaped,
    stacked,
)
from monarch.stdlib.data.engines import as_source
from monarch.stdlib.data.order import Order
from monarch.stdlib.data.progress import Progress
from monarch.stdlib.data.reader import Reader
from monarch.stdlib.data.sources import MAP, Block, Cursor, Source

Layouts = LayoutLike | Mapping[str, LayoutLike | None] | tuple[LayoutLike | None, ...] | None


@dataclass
class _Batch:
    """A batch that waits to be taken."""

    tensors: dict[Any, torch.Tensor]
    types: dict[Any, TensorType]
    handles: dict[Any, Any]
    """On the mesh; those are missing that could not be placed because it has lost a worker."""
    rows: int
    place: tuple[int, Cursor, int]
    """The epoch, and behind the batch the cursor and the number of batches of the epoch."""


def _batches(blocks: Iterator[Block], size: int | None, keep: bool) -> Iterator[tuple[Columns, Cursor]]:
    """The rows of blocks in batches of `size` (None: each block is one), and the cursor behind each: views where a
    batch is in one block. Without `keep` a last batch with fewer rows is dropped."""
    held: list[Columns] = []
    count, cursor = 0, (0, 0)
    for block in blocks:
        start, rows = 0, rows_of(block.columns)
        if size is None:
            yield block.columns, block.after(rows)
            continue
        while count + rows - start >= size:
            stop = start + size - count
            part = block.columns if (start, stop) == (0, rows) else cut(block.columns, start, stop)
            yield join([*held, part]), block.after(stop)
            held, count, start = [], 0, stop
        if start < rows:
            held.append(cut(block.columns, start, rows))
            count, cursor = count + rows - start, block.after(rows)
    if held and keep:
        yield join(held), cursor


class Stream:
    """Batches of a source, one behind the other; made by `monarch.data.stream`. Iterate over it, and close it (or use
    it in a `with` block) to end its thread before it is at its end."""

    def __init__(self, source: Source, mesh: Mesh | None, layouts: Layouts, options: _Options) -> None:
        self._source, self._mesh, self._options = source, mesh, options
        self._types = Types(layouts, mesh, user_source())
        self._place: tuple[int, Cursor, int] = (0, (0, 0), 0)
        self._goal = options.epochs
        # Without a seed random numbers follow torch.manual_seed. One is drawn here, in the program's thread, for the
        # one that reads draws from a generator of its own.
        draws = options.shuffle is None and (source.draws or options.map is not None)
        self._drawn = int(torch.randint(2**63 - 1, ())) if draws else options.shuffle or 0
        self._progress = Progress(options.progress)
        self._reader: Reader[_Batch] | None = None
        self._held: _Batch | None = None
        """One that could not be given, for the mesh had lost a worker."""
        self._finalizer: Callable[[], object] = lambda: None
        self._waited = 0.0

    # -- iterating -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Go on at the stream's place; at its end with as many epochs again."""
        if self._goal is not None and self._place[0] >= self._goal:
            self._goal = self._place[0] + (self._options.epochs or 0)
        return self

    def __next__(self) -> Any:
        if self._reader is None:
            if self._goal is not None and self._place[0] >= self._goal:
                raise StopIteration
            self._start()
        assert self._reader is not None
        try:
            batch = self._held = self._held or self._reader.first()
            self._reader.drop(batch)
            given = shaped({name: self._on_mesh(name, batch) for name in batch.tensors})
        except StopIteration:
            self.close()
            self._place = (self._goal or 0, (0, 0), 0)
            self._progress.end(self._where_at(self._place), self.waited)
            raise
        except DeviceMeshError:  # the batch is given once the mesh is healed
            raise
        except Exception:
            self.close()
            raise
        self._progress.count(batch.rows, self._where_at(batch.place), self.waited)
        # Where an interrupt comes before, the batch is still to be given; nothing comes between these.
        self._place = batch.place
        self._held = None
        return given

    def _start(self) -> None:
        places = self._mesh is not None and not self._mesh.is_abstract
        if places and self._mesh is not None:
            self._mesh.executor  # noqa: B018  (workers start in this thread)
        begin = self._place, self._goal, self._drawn
        made = _Maker(self._source, self._options, self._types, self._mesh, places, *begin)
        reader = Reader(made.batches(), self._options.ahead, made.doing)
        self._finalizer = weakref.finalize(self, reader.close)
        self._reader = reader

    def _on_mesh(self, name: Any, batch: _Batch) -> torch.Tensor:
        tensor = batch.tensors[name]
        if self._mesh is None:
            return tensor
        handle = batch.handles.get(name)
        owner: object = handle.owner if isinstance(handle, RemoteTensor) else None
        elsewhere = owner is not None and owner is not self._mesh.executor
        if handle is None or elsewhere or (isinstance(handle, RemoteTensor) and handle.step.error is not None):
            batch.handles.pop(name, None)  # the mesh lost a worker, was healed, or got another size since
            return put(tensor, self._mesh, batch.types[name])
        return of_handle(tensor, self._mesh, handle)

    # -- where it is -----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the stream is in, from 0; at its end the next one."""
        return self._place[0]

    @property
    def waited(self) -> float:
        """Seconds for which batches have been waited for, since the stream was made."""
        return self._waited + (0.0 if self._reader is None else self._reader.waited)

    def __len__(self) -> int:
        """The number of batches of an epoch. Raises TypeError where the source does not know its rows."""
        batches, rows = getattr(self._source, "batches", None), self._source.length
        if batches is not None:
            return int(batches)
        if rows is None or self._options.batch is None:
            raise TypeError(f"{self._source.name}: the number of rows is not known before they are read")
        return rows // self._options.batch if self._options.last == "drop" else -(-rows // self._options.batch)

    def _where_at(self, place: tuple[int, Cursor, int]) -> str:
        epoch, _, number = place
        epochs = "" if self._goal is None else f"/{self._goal}"
        try:
            batches = f"/{len(self):,}"
        except TypeError:
            batches = ""
        if number == 0 and epoch:
            return f"epoch {epoch}{epochs} done"
        return f"epoch {epoch + 1}{epochs} · batch {number:,}{batches}"

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, behind the last batch that was taken: whole numbers and texts. Another stream of the
        same source and seed goes on there, also on another mesh, and with other batches."""
        epoch, (row, offset), number = self._place
        return {
            "epoch": epoch,
            "row": row,
            "offset": offset,
            "batch": number,
            "seed": self._options.shuffle,
            "drawn": self._drawn,
            "window": self._options.window,
            "rows": self._source.length,
            "source": self._source.name,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError where this stream's rows would not be those that follow:
        its seed, window or number of rows is another."""
        options, mine = self._options, self.state_dict()
        for name in ("seed", "window", "rows") if options.shuffle is not None else ("seed", "rows"):
            if state[name] != mine[name]:
                raise DataError(
                    f"the state is of a stream of {state['source']} with {name} {state[name]}, and this one, of "
                    f"{mine['source']}, has {mine[name]}",
                    hint="make the stream with the same arguments as then; for other data start a new position.",
                )
        if not self._source.repeats and options.shuffle is None and state["row"]:
            raise DataError(
                f"{self._source.name} shuffles without a seed: the batches that followed cannot be made again",
                hint="give it one: stream(loader, …, shuffle=seed).",
            )
        self.close()
        self._drawn = int(state.get("drawn", self._drawn))
        self._place = int(state["epoch"]), (int(state["row"]), int(state["offset"])), int(state["batch"])
        if options.epochs is not None and self._place[0] >= (self._goal or 0):
            self._goal = self._place[0] + (options.epochs if self._place[1] == (0, 0) else 1)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread that reads, and close the source's files. The stream can go on afterwards. Idempotent."""
        if self._reader is not None:
            reader, self._reader = self._reader, None
            self._finalizer()  # closes it
            self._held = None
            self._waited += reader.waited

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Options:
    batch: int | None
    shuffle: int | None
    window: int
    epochs: int | None
    last: Literal["keep", "drop"]
    ahead: int
    columns: Sequence[str] | None
    map: Callable[[Any], Any] | None
    progress: bool | None


class _Maker:
    """The thread's function. It knows nothing of the stream, which can so be collected while the thread waits."""

    def __init__(
        self,
        source: Source,
        options: _Options,
        types: Types,
        mesh: Mesh | None,
        places: bool,
        place: tuple[int, Cursor, int],
        goal: int | None,
        drawn: int,
    ) -> None:
        self._source, self._options, self._mesh, self._places = source, options, mesh, places
        self._place, self._goal, self._drawn = place, goal, drawn
        self._types = types

        self._placing = False

    def doing(self) -> str:
        """The thread's activity, for messages."""
        if self._placing:
            return "its rows wait for the workers to take those before them"
        return f"{self._source.name} is read" + (f" ({self._source.doing})" if self._source.doing else "")

    def batches(self) -> Iterator[_Batch]:
        options = self._options
        epoch, cursor, number = self._place
        while self._goal is None or epoch < self._goal:
            order = Order(options.shuffle, epoch, options.window, self._drawn)
            blocks = self._source.read(order, cursor, options.batch or 1)
            found = number
            try:
                for columns, behind in _batches(blocks, options.batch, options.last == "keep"):
                    found += 1
                    yield self._made(columns, (epoch, behind, found), order)
            finally:
                blocks.close()  # type: ignore[attr-defined]
            if not found and not cursor[0]:
                self._refuse_empty()
            epoch, cursor, number = epoch + 1, (0, 0), 0

    def _refuse_empty(self) -> None:
        size = self._options.batch
        few = f"no whole batch of {size} rows, and last='drop'" if self._source.length else "no rows"
        raise DataError(f"an epoch of {self._source.name} has {few}")

    def _made(self, columns: Columns, place: tuple[int, Cursor, int], order: Order) -> _Batch:
        if self._options.columns is not None:
            columns = self._chosen(columns)
        if self._options.map is not None:
            columns = self._mapped(columns, place, order)
        tensors = {name: as_tensor(name, column) for name, column in columns.items()}
        rows = rows_of(columns)
        if self._mesh is None:
            return _Batch({name: tensor.clone() for name, tensor in tensors.items()}, {}, {}, rows, place)
        types = {name: self._types.of(name, tensor) for name, tensor in tensors.items()}
        handles: dict[Any, Any] = {}
        if self._places:
            self._placing = True
            executor = self._mesh.executor  # another one where the mesh has got another size
            with suppress(DeviceMeshError):  # who takes the batch tries again, and is told
                for name, tensor in tensors.items():
                    handles[name] = executor.put(tensor, types[name], lent=True)
            self._placing = False
        return _Batch(tensors, types, handles, rows, place)

    def _chosen(self, columns: Columns) -> Columns:
        """The columns that were asked for. Engines read no others; rows of single values and packed rows have all."""
        assert self._options.columns is not None
        if list(columns) == [None]:
            raise DataError(
                f"{self._source.name}: the rows are single values, without columns", hint="leave columns= out."
            )
        if missing := [name for name in self._options.columns if name not in columns]:
            raise DataError(
                f"{self._source.name}: there is no column {missing[0]!r}",
                hint=f"there are {', '.join(map(repr, columns))}.",
            )
        return {name: columns[name] for name in self._options.columns}

    def _mapped(self, columns: Columns, place: tuple[int, Cursor, int], order: Order) -> Columns:
        """A batch as the user's function makes it, of copies that it may change."""
        assert self._options.map is not None
        own = {
            name: column.clone()
            if isinstance(column, torch.Tensor)
            else Ragged(column.values.clone(), column.offsets)
            if isinstance(column, Ragged)
            else column
            for name, column in columns.items()
        }
        epoch, (row, offset), _ = place
        name = getattr(self._options.map, "__name__", "map")
        what = f"what {name}() makes of the rows before row {row:,} in epoch {epoch}"
        with self._source.reading(what), order.draws(MAP, row, offset):
            made = self._options.map(shaped(own))
            named = made if isinstance(made, Mapping) else {None: made}
            if isinstance(made, (tuple, list)):
                named = dict(enumerate(made))
            if not named:
                raise DataError("it gives no columns", hint="return a batch's columns: tensors, by name or position.")
            return {column: _made_of(column, value) for column, value in named.items()}


def _made_of(name: Any, value: Any) -> Column:
    """A column that a function of the user's gives. Raises DataError for any other result."""
    if isinstance(value, np.ndarray):
        return from_array(value, own=True)
    if isinstance(value, list) and value:
        return stacked(name, value)
    if isinstance(value, (torch.Tensor, Ragged)):
        return value
    raise DataError(
        f"for {called(name)} it gives {'an empty list' if value == [] else type(value).__name__}",
        hint="return tensors, arrays, or lists with a value for each row.",
    )


class Types:
    """The types that columns have on the mesh."""

    def __init__(self, layouts: Layouts, mesh: Mesh | None, line: Line | None) -> None:
        self._layouts, self._mesh, self._line = layouts, mesh, line
        self._known: dict[Any, TensorType] = {}

    def of(self, name: Any, tensor: torch.Tensor) -> TensorType:
        """The type of a batch's column. Raises LayoutError where its layout does not fit."""
        key = name, tensor.dtype, tuple(tensor.shape)
        if key not in self._known:
            self._known[key] = self._found(name, TensorType(tensor.dtype, tuple(tensor.shape)))
        return self._known[key]

    def _found(self, name: Any, type_: TensorType) -> TensorType:
        assert self._mesh is not None
        mesh, layouts, layout = self._mesh.spec, self._layouts, self._layouts
        label = called(name)
        if isinstance(layouts, (Mapping, tuple)):
            known: Any = dict(enumerate(layouts)) if isinstance(layouts, tuple) else layouts
            if name not in known:
                raise LayoutError(
                    f"no layout for {label}",
                    hint=f"there are layouts for {', '.join(map(repr, known))}: give one for each column, or one for "
                    "all.",
                    source=self._line,
                )
            layout = known[name]
        if layout is None:
            return type_
        if isinstance(layouts, (Mapping, tuple)):
            return type_.with_layout(as_layout(layout, type_, mesh, label, self._line))  # type: ignore[arg-type]
        # One for all columns is that of their first dims; the others are whole.
        named: Any = parse_layout(layout) if isinstance(layout, str) else layout
        placements = not isinstance(named, Layout) and any(hasattr(each, "is_shard") for each in named)
        entries = named.ndim if isinstance(named, Layout) else len(named)
        rank = type_.ndim if placements else min(entries, type_.ndim)
        first = as_layout(named, TensorType(type_.dtype, type_.shape[:rank]), mesh, label, self._line)
        whole: tuple[tuple[str, ...], ...] = ((),) * (type_.ndim - rank)
        return type_.with_layout(Layout(first.shards + whole, first.partial, first.varying))


def stream(
    source: Any,
    mesh: Mesh | None,
    layout: Layouts = None,
    *,
    batch: int | None = None,
    shuffle: int | None = None,
    window: int = 8192,
    epochs: int | None = 1,
    last: Literal["keep", "drop"] = "keep",
    columns: Sequence[str] | None = None,
    map: Callable[[Any], Any] | None = None,
    ahead: int = 2,
    progress: bool | None = None,
) -> Stream:
    """Batches of a source as distributed tensors, read ahead in the background:

        batches = monarch.data.stream("train/*.parquet", mesh, "[@data]", batch=64, shuffle=7)
        for batch in batches:
            loss = train_step(batch["x"], batch["y"])

    `source`: Parquet files (a path, a glob, a folder, a list of these), an Arrow table, data set or reader, a Polars
    frame, a DuckDB relation or `monarch.data.query`, an Ibis table, NumPy arrays and memory maps or tensors (one, a
    tuple, a dict), a data set of PyTorch's or of Hugging Face's, a DataLoader, an iterable of rows, or a function that
    returns one (and may take the epoch). Batches are dicts, tuples or single tensors, as rows are.

    `layout`: a layout for all columns, of whose dims it names the first, or one for each, by name or position; None is
    replicated. Without a mesh (None) batches are plain tensors.

    `batch`: the rows of a batch; not given for a DataLoader, whose batches are taken. `last` says whether the last
    batch of an epoch, with fewer rows, is kept or dropped.

    `shuffle`: a seed. The order of rows depends on it, the epoch and the position alone. Sources with random access
    are permuted as a whole. Others are permuted by groups (the row groups of Parquet files) where they have them, and
    by rows within windows of `window` rows, which are in memory.

    `epochs`: of one `for`; another `for` goes on with the next ones. None is without an end.

    `columns`: those that are read. `map`: a function, run in the background, that gets a batch's columns (tensors,
    `Ragged`, lists), as copies, and returns those that go to the mesh.

    `ahead`: so many batches are made before they are asked for. `progress`: whether a line on standard error shows the
    place and the rate; None is in terminals and notebooks.

    Raises DataError for what is no source. What goes wrong while it is read is raised as a DataError, which names the
    row or file, where the batch would be given. A source that gives no batch for `stall_warning` seconds is logged.
    """
    for what, number in (("batch", batch), ("window", window), ("ahead", ahead), ("epochs", epochs)):
        if number is not None and (isinstance(number, bool) or not hasattr(number, "__index__") or number < 1):
            raise DataError(f"{what}={number!r}", hint="give a whole number from 1.")
    if isinstance(shuffle, bool) or not (shuffle is None or hasattr(shuffle, "__index__")):
        raise DataError(
            f"shuffle={shuffle!r}", hint="it is a seed, as shuffle=0; leave it out for rows in the source's order."
        )
    if isinstance(columns, str):
        raise DataError(f"columns={columns!r}", hint=f"give a list: columns=[{columns!r}].")
    batch, shuffle = None if batch is None else int(batch), None if shuffle is None else int(shuffle)
    if mesh is not None:
        check_mesh(mesh, "stream(source, mesh, layout, batch=32)", user_source())
    found = as_source(source, columns)
    if found.batched:
        if batch is not None or last != "keep":
            raise DataError("the DataLoader makes the batches", hint="give batch_size and drop_last to the DataLoader.")
    elif batch is None:
        raise DataError("batches of how many rows?", hint="say how many rows a batch has: stream(…, batch=32).")
    if last not in ("keep", "drop"):
        raise DataError(f"last={last!r}", hint="the last batch of an epoch is kept or dropped: 'keep' or 'drop'.")
    return Stream(found, mesh, layout, _Options(batch, shuffle, window, epochs, last, ahead, columns, map, progress))
