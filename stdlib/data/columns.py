"""Columns of rows: tensors, rows of different lengths, or Python values; views where nothing has to be copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monarch.compiler.errors import MonarchError


class DataError(MonarchError):
    """A source of data cannot be read, or its rows cannot become tensors."""


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`. `offsets` is i64[rows + 1]."""

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    @staticmethod
    def of(rows: Sequence[torch.Tensor]) -> Ragged:
        """Rows of one dtype, each 1-D, one behind the other."""
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor([len(row) for row in rows], dtype=torch.int64), 0, out=offsets[1:])
        return Ragged(torch.cat(list(rows)) if rows else torch.zeros(0, dtype=torch.int64), offsets)

    def pad(self, length: int, value: float = 0) -> torch.Tensor:
        """All rows with this length, as a tensor [rows, length]: longer ones lose their end, shorter ones get `value`
        behind theirs."""
        padded = self.values.new_full((len(self), length), value)
        for number in range(len(self)):
            row = self[number][:length]
            padded[number, : len(row)] = row
        return padded


Column = torch.Tensor | Ragged | list[Any]
Columns = dict[Any, Column]
"""Columns by name; where rows are tuples by position, and where a row is one value by None."""


def rows_of(columns: Columns) -> int:
    """The number of rows of columns. A number alone counts as one."""
    first = next(iter(columns.values()), ())
    return 1 if isinstance(first, torch.Tensor) and first.ndim == 0 else len(first)


def cut(columns: Columns, start: int, stop: int) -> Columns:
    """Some rows in a row, as views."""

    def part(column: Column) -> Column:
        if isinstance(column, Ragged):
            return Ragged(column.values, column.offsets[start : stop + 1])
        return column[start:stop]

    return {name: part(column) for name, column in columns.items()}


def take(columns: Columns, index: np.ndarray) -> Columns:
    """Rows by number: a copy."""
    wanted = torch.from_numpy(index)

    def part(column: Column) -> Column:
        if isinstance(column, torch.Tensor):
            return column.index_select(0, wanted)
        if isinstance(column, Ragged):
            return Ragged.of([column[int(row)] for row in index])
        return [column[row] for row in index]

    return {name: part(column) for name, column in columns.items()}


def join(parts: Sequence[Columns]) -> Columns:
    """One behind the other; the same object where there is one. Raises DataError where columns differ."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for other in parts[1:]:
        if other.keys() != first.keys():
            raise DataError(
                f"rows have the columns {_names(first)}, and later ones {_names(other)}",
                hint="give all rows the same columns, or say which to read: columns=[…].",
            )
    return {name: _joined(name, [part[name] for part in parts]) for name in first}


def _joined(name: Any, columns: Sequence[Column]) -> Column:
    if all(isinstance(column, list) for column in columns):
        return [value for column in columns for value in column]  # type: ignore[union-attr]
    tensors = [column for column in columns if isinstance(column, torch.Tensor)]
    if len(tensors) == len(columns) and len({(each.shape[1:], each.dtype) for each in tensors}) == 1:
        return torch.cat(tensors)
    rows = [column if isinstance(column, Ragged) else _ragged(column) for column in columns]
    ragged = [each for each in rows if each is not None]
    if len(ragged) < len(columns) or len({each.values.dtype for each in ragged}) > 1:
        kinds = ", ".join(dict.fromkeys(map(kind, columns)))
        raise DataError(
            f"the rows of {called(name)} are of several kinds: {kinds}",
            hint="give all rows the same dtype and shape (1-D ones may differ in length).",
        )
    starts, offsets = 0, [torch.zeros(1, dtype=torch.int64)]
    values = []
    for each in ragged:
        first, last = int(each.offsets[0]), int(each.offsets[-1])
        values.append(each.values[first:last])
        offsets.append(each.offsets[1:] - first + starts)
        starts += last - first
    return Ragged(torch.cat(values), torch.cat(offsets))


def _ragged(column: Column) -> Ragged | None:
    if isinstance(column, torch.Tensor) and column.ndim == 2:
        return Ragged(column.reshape(-1), torch.arange(len(column) + 1) * column.shape[1])
    return None


def kind(column: Column) -> str:
    """The type of a column's rows, for people."""
    if isinstance(column, torch.Tensor):
        return f"{str(column.dtype).removeprefix('torch.')} of shape {list(column.shape[1:])}"
    if isinstance(column, Ragged):
        return f"{str(column.values.dtype).removeprefix('torch.')} of different lengths"
    first = column[0] if column else None
    inner = f" of {type(first[0]).__name__}" if isinstance(first, (list, tuple)) and first else ""
    return type(first).__name__ + inner if column else "nothing"


def called(name: Any) -> str:
    """A column, for people: by name, by position in tuples, or the only one."""
    return "the batch" if name is None else f"column {name!r}"


def _mapped(name: Any, change: str) -> str:
    """The `map` that changes one column, as a line of Python; `change` has `{}` for the column."""
    if name is None:
        return f"map=lambda rows: {change.format('rows')}"
    if isinstance(name, int):
        before = f"*batch[:{name}], " if name else ""
        return f"map=lambda batch: ({before}{change.format(f'batch[{name}]')}, *batch[{name + 1}:])"
    return f"map=lambda batch: {{**batch, {name!r}: {change.format(f'batch[{name!r}]')}}}"


def _names(columns: Columns) -> str:
    return ", ".join(map(repr, columns))


def as_tensor(name: Any, column: Column) -> torch.Tensor:
    """A column of a batch as a tensor [rows, …]. Raises DataError where it is none."""
    if isinstance(column, torch.Tensor):
        return column
    if isinstance(column, Ragged):
        lengths = column.offsets.diff()
        low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
        if low == high:
            start = int(column.offsets[0])
            return column.values[start : start + len(column) * low].reshape(len(column), low)
        raise DataError(
            f"the rows of {called(name)} have {low} to {high} elements, and a tensor's rows are equally long",
            hint="pack them: stream(monarch.data.pack(source, length=1024, …), …), or pad them: "
            f"{_mapped(name, '{}.pad(length)')}.",
        )
    first: Any = column
    passed: set[int] = set()  # a list may contain itself
    while isinstance(first, (list, tuple)) and first and id(first) not in passed:
        passed.add(id(first))
        first = first[0]
    if isinstance(first, (bool, int, float)):
        raise DataError(
            f"{called(name)} holds lists of lists",
            hint=f"where they are equally long, make a tensor of them: {_mapped(name, 'torch.tensor({})')}.",
        )
    raise DataError(
        f"{called(name)} holds {kind(column)} values, which are no tensors",
        hint=("" if name is None else "leave it out with columns=[…], or ")
        + "make numbers of it: stream(…, map=function), which gets each batch's columns, and returns tensors.",
    )


def collate(rows: Sequence[Any], wanted: Sequence[str] | None = None) -> Columns:
    """Columns of rows that are mappings, tuples or single values. `wanted` are those that will be read, for advice.
    Raises DataError where rows have different columns."""
    first = rows[0]
    if isinstance(first, Mapping):
        for row in rows:
            if row.keys() != first.keys():
                raise DataError(
                    f"rows have the columns {_names(dict(first))}, and later ones {_names(dict(row))}",
                    hint="give all rows the same columns.",
                )
        return {name: stacked(name, [row[name] for row in rows]) for name in first}
    if isinstance(first, (tuple, list)):
        if any(len(row) != len(first) for row in rows):
            raise DataError(
                "rows are tuples of different lengths",
                hint="give all rows the same number of values. A row that is one list goes into a dict: "
                f"{{{(wanted or ['x'])[0]!r}: row}}.",
            )
        return {at: stacked(at, [row[at] for row in rows]) for at in range(len(first))}
    return {None: stacked(None, rows)}


def stacked(name: Any, values: Sequence[Any]) -> Column:
    """One column of a value for each row. Raises DataError for tensors that neither stack nor are one-dimensional."""
    first = values[0]
    if isinstance(first, np.ndarray):
        values = [torch.from_numpy(np.array(value)) for value in values]
    elif isinstance(first, (bool, int, float, np.generic)):
        return torch.from_numpy(np.asarray(values)) if isinstance(first, np.generic) else torch.tensor(list(values))
    elif isinstance(first, (list, tuple)) and all(_is_numbers(value) for value in values):
        return Ragged.of([torch.tensor(value) if len(value) else torch.zeros(0, dtype=torch.int64) for value in values])
    elif not isinstance(first, torch.Tensor):
        return list(values)
    tensors = [value.detach() for value in values]
    if len({(value.shape, value.dtype) for value in tensors}) == 1:
        return torch.stack(tensors)
    if all(value.ndim == 1 for value in tensors) and len({value.dtype for value in tensors}) == 1:
        return Ragged.of(tensors)
    shapes = ", ".join(sorted({str(list(value.shape)) for value in tensors}))
    raise DataError(
        f"the rows of {called(name)} have the shapes {shapes}",
        hint="give all rows one shape (1-D ones may differ in length).",
    )


def _is_numbers(value: Any) -> bool:
    return all(isinstance(each, (bool, int, float)) for each in value)


def shaped(columns: Mapping[Any, Any]) -> Any:
    """Values by column, as the rows of the source have them: a dict, a tuple, or one value."""
    if list(columns) == [None]:
        return columns[None]
    if columns and all(isinstance(name, int) for name in columns):
        return tuple(columns.values())
    return dict(columns)
