"""Arrow's and NumPy's memory as tensors, without a copy where dtypes allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from monarch.compiler.loading import load
from monarch.stdlib.data.columns import Column, Columns, DataError, Ragged, join


class _Memory:
    """Memory of an owner that keeps it alive, for NumPy: as if it could be written, for else torch warns of it. The
    memory of a source is never written (see `stream`)."""

    def __init__(self, owner: object, address: int, shape: tuple[int, ...], typestr: str, strides: Any = None) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
        }


def from_array(array: np.ndarray, own: bool = False) -> torch.Tensor:
    """An array's memory as a tensor: a view where it cannot be written or is the stream's `own`, and a copy where its
    owner could change it meanwhile, or torch does not have its dtype or strides. Raises DataError for values that are
    no numbers."""
    wider = {"u2": np.int32, "u4": np.int64}.get(array.dtype.str[1:])
    if array.dtype.str[1:] == "u8":
        if array.size and int(array.max()) >= 2**63:
            raise DataError("unsigned numbers of 2**63 and above have no dtype on a mesh", hint="cast them to float64.")
        wider = np.int64
    if wider is not None or not array.dtype.isnative:
        return torch.from_numpy(array.astype(wider or array.dtype.newbyteorder("=")))
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(f"arrays of dtype {array.dtype} cannot become tensors", hint="cast them to numbers first.")
    if own and array.flags.writeable:
        return torch.from_numpy(array)
    if array.flags.writeable or any(stride < 0 for stride in array.strides):
        return torch.from_numpy(array.copy())
    memory = _Memory(array, array.ctypes.data, array.shape, array.dtype.str, array.strides)
    return torch.from_numpy(np.asarray(memory))


def from_arrow(table: Any, first: int = 0) -> Columns:
    """The columns of a pyarrow Table or RecordBatch, whose first row has number `first` in its source. A column of
    several chunks is copied into one. Raises DataError for nulls."""
    found: Columns = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if name in found:
            raise DataError(f"two columns are called {name!r}", hint="name them apart.")
        chunks = column.chunks if hasattr(column, "chunks") else [column]
        parts, at = [], first
        for chunk in chunks:
            if len(chunk) or len(chunks) == 1:
                parts.append({name: _column(name, chunk, at)})
            at += len(chunk)
        found[name] = join(parts)[name] if parts else _column(name, load("pyarrow").array([], column.type), first)
    return found


def _column(name: str, array: Any, first: int) -> Column:
    types = load("pyarrow").types
    if hasattr(array, "storage"):  # an extension type
        shape = getattr(array.type, "shape", None)
        if shape is None or None in shape:
            return _column(name, array.storage, first)
        storage = array.storage
        while hasattr(storage, "flatten") and types.is_nested(storage.type):  # lists of lists, as in datasets' Array2D
            storage = storage.flatten()
        rows = _column(name, storage, first)
        return rows.reshape(-1, *shape) if isinstance(rows, torch.Tensor) else rows
    kind = array.type
    if types.is_dictionary(kind):
        return _column(name, array.dictionary_decode(), first)
    if array.null_count:
        row = first + array.is_null().index(True).as_py()
        raise DataError(
            f"column {name!r} has {array.null_count:,} nulls, the first in row {row:,}",
            hint="fill or drop them: a tensor has a number in each place.",
        )
    if types.is_fixed_size_list(kind):
        rows = _column(name, array.flatten(), first)
        return rows.reshape(len(array), kind.list_size, *rows.shape[1:]) if isinstance(rows, torch.Tensor) else rows
    if types.is_list(kind) or types.is_large_list(kind):
        values = _column(name, array.values, first)
        offsets = from_array(array.offsets.to_numpy()).long()
        if isinstance(values, torch.Tensor) and values.ndim == 1:
            return Ragged(values, offsets)
        return array.to_pylist()
    if types.is_boolean(kind):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    if types.is_integer(kind) or types.is_floating(kind):
        return from_array(array.to_numpy())
    if types.is_temporal(kind) or types.is_decimal(kind):
        raise DataError(
            f"column {name!r} is of type {kind}, which is no number",
            hint="cast it in the source, for instance to int64 or float32, or leave it out with columns=[…].",
        )
    return array.to_pylist()
