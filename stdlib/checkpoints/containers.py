"""The ZIP files into which `torch.save` puts a tensor, written around elements that are written elsewhere, and read
without loading a pickle: a checkpoint of `torch.distributed.checkpoint` has one for each block.

    data.pkl    how the tensor is made of its storage: dtype, sizes, strides
    byteorder   "little"
    version     "3"
    data/0      the elements, at an offset that 64 divides
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import IO, Any

import torch

_ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_DATA = "archive/data/0"
LARGEST = 1 << 30
"""Blocks have at most about so many bytes: ZIP files of more than 4 GiB are of another form."""


class _Storage:
    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
        self.said = ("storage", kind, "0", "cpu", numel)


class _Made:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        storage = _Storage(self._dtype, prod(self._shape))
        strides = torch.empty(self._shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, self._shape, strides, False, collections.OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.said if isinstance(obj, _Storage) else None


@dataclass(frozen=True)
class Container:
    """The container of a row-major block that stands at offset `at` of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def elements(self) -> int:
        """Where in the file the elements begin."""
        before = self.at + sum(len(_local(name, data)) + len(data) for name, data in self._small)
        before += len(_local(_DATA, b""))
        return before + -before % _ALIGNMENT

    @property
    def _small(self) -> list[tuple[str, bytes]]:
        return [("archive/data.pkl", _pickled(self.dtype, self.shape)), *_ALWAYS]

    @property
    def head(self) -> bytes:
        """The bytes before the elements. Their CRC-32, which PyTorch does not check, is left at 0."""
        made = b"".join(_local(name, data) + data for name, data in self._small)
        padding = self.elements - self.at - len(made) - len(_local(_DATA, b""))
        return made + _local(_DATA, b"", 0, self.size, padding)

    @property
    def tail(self) -> bytes:
        """The bytes behind them."""
        at, listed = 0, b""
        for name, data in self._small:
            listed += _central(name, at, zlib.crc32(data), len(data))
            at += len(_local(name, data)) + len(data)
        listed += _central(_DATA, at, 0, self.size)
        count, start = len(self._small) + 1, self.elements - self.at + self.size
        return listed + _END.pack(b"PK\x05\x06", 0, 0, count, count, len(listed), start, 0)

    @property
    def end(self) -> int:
        """Where in the file it ends."""
        return self.elements + self.size + len(self.tail)


_ALWAYS = [("archive/byteorder", b"little"), ("archive/version", b"3\n")]


@lru_cache(1024)
def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    made = io.BytesIO()
    _Pickler(made, protocol=2).dump(_Made(dtype, shape))
    return made.getvalue()


def _local(name: str, data: bytes, crc: int | None = None, size: int | None = None, padding: int = 0) -> bytes:
    crc, size = zlib.crc32(data) if crc is None else crc, len(data) if size is None else size
    # Padding is an extra field of a kind that nobody knows: 4 bytes of head, and zeros.
    extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
    return _LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, 33, crc, size, size, len(name), len(extra)) + name.encode() + extra


def _central(name: str, at: int, crc: int, size: int) -> bytes:
    fields = (b"PK\x01\x02", 20, 20, 0, 0, 0, 33, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
    return _CENTRAL.pack(*fields) + name.encode()


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a container of any writer: the offset of its first element in the file, and its strides."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Slice(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(0, self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Layout(pickle.Unpickler):
    """Finds how a tensor is made, and makes none."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, strides, *_: (storage, offset, size, strides)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return torch.storage._storage_type_to_dtype_map().get(name, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def find(file: IO[bytes], start: int, length: int) -> StoredTensor | None:
    """The tensor in the container that stands there; None where it is no plain one of an uncompressed container. Raises
    zipfile.BadZipFile."""
    with zipfile.ZipFile(_Slice(file, start, length)) as container:
        names = {info.filename.split("/", 1)[-1]: info for info in container.infolist()}
        try:
            storage, offset, size, strides = _Layout(io.BytesIO(container.read(names["data.pkl"]))).load()
            data = names[f"data/{storage[2]}"]
        except (KeyError, TypeError, ValueError, pickle.UnpicklingError):
            return None
        little = "byteorder" not in names or container.read(names["byteorder"]) == b"little"
    dtype = storage[1]
    if not isinstance(dtype, torch.dtype) or not little or data.compress_type != zipfile.ZIP_STORED:
        return None
    file.seek(start + data.header_offset)
    fields = _LOCAL.unpack(file.read(_LOCAL.size))
    elements = start + data.header_offset + _LOCAL.size + fields[-2] + fields[-1]
    if (sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + offset + 1) * dtype.itemsize > data.file_size:
        return None if prod(size) else StoredTensor(elements, dtype, tuple(size), tuple(strides))
    return StoredTensor(elements + offset * dtype.itemsize, dtype, tuple(size), tuple(strides))


__all__ = ["LARGEST", "Container", "StoredTensor", "find"]
