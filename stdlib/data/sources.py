"""How sources give their rows: any rows by number, groups of rows, or one row behind the other."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from monarch.stdlib.data.arrow import from_arrow
from monarch.stdlib.data.columns import Columns, DataError, collate, cut, join, rows_of, take
from monarch.stdlib.data.order import Order

GROUP, WITHIN = 1, 2
"""The purposes of permutations: the order of groups of rows, and that of rows within a window."""
TOKENS, MAP = 1, 2
"""The purposes of random numbers that are no row's: a tokenizer's, and those of a stream's `map`."""

Cursor = tuple[int, int]
"""Where an epoch goes on: a row of the source, and for packed rows how much of it has been read."""


@dataclass(frozen=True)
class Block:
    """Some rows of an epoch, one behind the other, and where the epoch goes on behind each of them."""

    columns: Columns
    after: Callable[[int], Cursor]
    """The cursor behind the first so many rows."""


def _behind(start: int, rows: int) -> Cursor:
    return start + rows, 0


class Source(ABC):
    """The origin of rows."""

    name: str
    """Its name, for people."""
    length: int | None = None
    """The number of rows of an epoch, where it is known."""
    repeats = True
    """Whether the same seed and epoch give the same rows again."""
    batched = False
    """Whether each block is a batch, as someone else has made it."""
    draws = False
    """Whether code of the user's makes rows in the thread that reads, and so may draw random numbers."""
    _doing = ""

    @property
    def doing(self) -> str:
        """The part that is being read now, for messages; empty while nothing is."""
        return self._doing

    @abstractmethod
    def read(self, order: Order, cursor: Cursor, size: int) -> Iterator[Block]:
        """The rows of an epoch from a cursor on. `size` is the size of batches, as a hint."""

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Name the part that is being read, also in the DataError of a failure."""
        self._doing = what
        try:
            yield
        except DataError as error:
            raise DataError(f"{what} of {self.name}: {error.message}", hint=error.hint) from error
        except Exception as error:  # whatever a user's data set or an engine raises
            raise DataError(f"cannot read {what} of {self.name}: {type(error).__name__}: {error}") from error
        self._doing = ""


class RandomAccess(Source):
    """A source that gives any rows by their numbers: shuffled by a permutation of all of them."""

    length: int

    @abstractmethod
    def take(self, rows: slice | np.ndarray, order: Order) -> Columns:
        """These rows, as they are numbered here."""

    def read(self, order: Order, cursor: Cursor, size: int) -> Iterator[Block]:
        permutation = None if order.seed is None else order.permutation(self.length)
        for start in range(cursor[0], self.length, size):
            stop = min(start + size, self.length)
            rows: slice | np.ndarray = slice(start, stop)
            if permutation is not None:
                rows = permutation.at(np.arange(start, stop))
            with self.reading(f"rows {start:,} to {stop - 1:,}" + " in shuffled order" * (permutation is not None)):
                columns = self.take(rows, order)
            yield Block(columns, partial(_behind, start))


class Forward(Source):
    """A source that is read from its beginning, or from one of its groups: shuffled within windows of rows."""

    @abstractmethod
    def forward(self, order: Order, start: int, size: int) -> Generator[Columns]:
        """Columns of rows from row `start` on. With a seed its groups are in another order at each epoch. Their reader
        waits for `size` rows. Raises DataError."""

    def read(self, order: Order, cursor: Cursor, size: int) -> Iterator[Block]:
        at = cursor[0]
        if order.seed is None:
            with closing(self.forward(order, at, size)) as parts:
                for columns in parts:
                    count = rows_of(columns)
                    yield Block(columns, partial(_behind, at))
                    at += count
            return
        number, skip = divmod(at, order.window)
        with closing(self.forward(order, number * order.window, order.window)) as parts:
            for columns in regrouped(parts, order.window):
                count = rows_of(columns)
                rows = order.permutation(count, WITHIN, number).at(np.arange(count))[skip:]
                start = number * order.window + skip
                for first in range(0, len(rows), size):  # a gather for each batch, rather than one that it waits for
                    part = take(columns, rows[first : first + size])
                    yield Block(part, partial(_behind, start + first))
                number, skip = number + 1, 0


def regrouped(parts: Iterable[Columns], size: int) -> Iterator[Columns]:
    """The same rows in parts of `size`, the last one with the rest: views where a part is in one of `parts`."""
    held: list[Columns] = []
    count = 0
    for columns in parts:
        start, rows = 0, rows_of(columns)
        while count + rows - start >= size:
            stop = start + size - count
            yield join([*held, cut(columns, start, stop)])
            held, count, start = [], 0, stop
        if start < rows:
            held.append(cut(columns, start, rows))
            count += rows - start
    if held:
        yield join(held)


@dataclass(frozen=True)
class RowGroup:
    """Rows that are read together, such as a row group of a Parquet file."""

    name: str
    rows: int
    read: Callable[[], Any]
    """Gives a pyarrow Table."""


class Grouped(Forward):
    """Groups of rows, such as those of Parquet files: read in an order of their own at each epoch."""

    def __init__(self, name: str, groups: Sequence[RowGroup]) -> None:
        self.name = name
        self._groups = groups
        self.length = sum(group.rows for group in groups)

    def forward(self, order: Order, start: int, size: int) -> Generator[Columns]:
        numbers = np.arange(len(self._groups))
        if order.seed is not None:
            numbers = order.permutation(len(numbers), GROUP).at(numbers)
        ends = list(itertools.accumulate(self._groups[int(number)].rows for number in numbers))
        for at in range(bisect.bisect_right(ends, start), len(numbers)):
            group = self._groups[int(numbers[at])]
            skip = max(0, start - ends[at] + group.rows)
            with self.reading(group.name):
                table = group.read()
                if table.num_rows != group.rows:
                    raise DataError(f"it has {table.num_rows:,} rows, and had {group.rows:,} when the stream was made")
            row = skip
            for batch in table.slice(skip).to_batches():
                with self.reading(group.name):
                    columns = from_arrow(batch, row)
                row += batch.num_rows
                if batch.num_rows:
                    yield columns


class Sequential(Forward):
    """Parts of rows that come one behind the other, again for each epoch. To go on at a row is to read those before it
    once more."""

    def __init__(
        self,
        name: str,
        parts: Callable[[int, int], Iterable[Columns]],
        length: int | None = None,
        once: bool = False,
        draws: bool = False,
    ) -> None:
        """`parts` gives those of an epoch, of at most so many rows where they come one by one. With `once` there is one
        epoch."""
        self.name = name
        self.length = length
        self.draws = draws
        self._parts = parts
        self._once = once
        self._opened = False

    def forward(self, order: Order, start: int, size: int) -> Generator[Columns]:
        if self._once and self._opened:
            raise DataError(
                f"{self.name} can be read once, and another epoch, or another position, was asked for",
                hint="give a function that makes it: stream(lambda: …, …).",
            )
        self._opened = True
        row, skipped = 0, 0
        draws = order.draws() if self.draws else nullcontext()
        with self.reading("its beginning"), draws:
            parts = iter(self._parts(order.epoch, size))
        try:
            while True:
                with self.reading(f"row {row:,}"), draws:
                    columns = next(parts, None)
                if columns is None:
                    return
                count = rows_of(columns)
                row += count
                if skipped < start:
                    skip = min(start - skipped, count)
                    skipped += skip
                    columns = cut(columns, skip, count)
                if rows_of(columns):
                    yield columns
        finally:
            with suppress(AttributeError):  # iterators that are no generators
                parts.close()  # type: ignore[attr-defined]


def parts_of_rows(rows: Iterable[Any], size: int, wanted: Sequence[str] | None = None) -> Iterator[Columns]:
    """Rows that come one by one, in parts of columns. Rows read before an error are given before it is raised."""
    held: list[Any] = []
    found = iter(rows)
    try:
        while True:
            try:
                held.append(next(found))
            except StopIteration:
                break
            except Exception:
                if held:
                    yield collate(held, wanted)
                held = []
                raise
            if len(held) == size:
                yield collate(held, wanted)
                held = []
        if held:
            yield collate(held, wanted)
    finally:
        if hasattr(found, "close"):
            found.close()


class Batched(Source):
    """Batches as a `torch.utils.data.DataLoader` makes them."""

    batched = True

    def __init__(
        self, name: str, batches: Callable[[Order], Iterator[Columns]], length: int | None, draws: bool
    ) -> None:
        self.name, self.draws = name, draws
        self.batches = length
        self._batches = batches

    def read(self, order: Order, cursor: Cursor, size: int) -> Iterator[Block]:
        draws = order.draws() if self.draws else nullcontext()
        with self.reading("its beginning"):
            found = self._batches(order)
        try:
            for number in itertools.count():
                with self.reading(f"batch {number:,}"), draws:
                    columns = next(found, None)
                if columns is None:
                    return
                if number >= cursor[0]:
                    yield Block(columns, partial(_behind, number + 1 - rows_of(columns)))
        finally:
            found.close()  # type: ignore[attr-defined]
