"""safetensors: one file, or a folder of files with Hugging Face's `model.safetensors.index.json`.

A file is the length of its header, the header (JSON: of each tensor its dtype, its sizes, and where behind the header
its elements stand, row-major), and the elements. Ours have checksums in the header's metadata, as text: that of
the header itself, a CRC-32, and those of the blocks."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path as FilePath
from typing import Any

import torch

from monarch.compiler.errors import CheckpointError
from monarch.compiler.execution.storage import SUM_BYTES, SUM_DIGITS, Piece, Stored
from monarch.compiler.types import Layout
from monarch.language import DistributedTensor
from monarch.runtime.shared.files import Target
from monarch.stdlib.checkpoints.blocks import BlockPart, SavedTensor, Shares, relaid
from monarch.stdlib.checkpoints.catalog import Catalog, Entry

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
_WRITTEN = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_SHARD_BYTES = 5 << 30
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_BLOCKS, _SUMS, _OWN = "monarch.blocks", "monarch.checksums", "monarch.header"


def is_file(path: FilePath) -> bool:
    """Whether a path is that of one file of this format."""
    return path.suffix == ".safetensors"


def strangers(path: FilePath) -> list[str]:
    """Files there that are no part of a checkpoint of this format."""
    if is_file(path) or not path.is_dir():
        return [] if is_file(path) and path.is_file() else [path.name]
    return [name for name in sorted(os.listdir(path)) if name != INDEX and not _WRITTEN.fullmatch(name)]


def laid_in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a layout in which each worker's block is one stretch of a file: sharded along its first dim, unless
    it is so already."""
    if not isinstance(tensor, DistributedTensor) or not tensor.ndim or tensor.sharding.varying:
        return tensor
    dim = next((dim for dim, length in enumerate(tensor.shape) if length != 1), 0)
    shards = tensor.sharding.shards
    if all(not names for names in shards[dim + 1 :]):
        return tensor
    over = (*shards[dim], *(name for at, names in enumerate(shards) if at != dim for name in names))
    return relaid(tensor, Layout(tuple(over if at == dim else () for at in range(tensor.ndim))))


class TensorsWriter:
    """Writes one file or folder of this format, as `DcpWriter` does. Raises CheckpointError for a dtype that the format
    does not have."""

    def __init__(
        self, folder: FilePath, path: FilePath, sources: Sequence[SavedTensor], ties: Mapping[str, str]
    ) -> None:
        for source in sources:
            if source.dtype not in _NAMES:
                raise CheckpointError(
                    f"'{source.name}' is {source.dtype}, which safetensors does not have",
                    hint="save it in another format: format='dcp'.",
                )
        self.pieces: list[tuple[SavedTensor, list[Piece]]] = []
        shares = Shares()
        groups = [list(sources)] if is_file(path) else _grouped(sources)
        names = [path.name] if is_file(path) else _file_names(len(groups))
        self._files = [_File(folder / name, group, ties, shares) for name, group in zip(names, groups, strict=True)]
        for file in self._files:
            self.pieces += file.pieces
        self._index = None if len(groups) == 1 else folder / INDEX

    def finish(self, sums: Mapping[tuple[str, int], list[str]]) -> None:
        """As that of `DcpWriter`."""
        for file in self._files:
            file.finish(sums)
        if self._index is not None:
            total = sum(file.size for file in self._files)
            where = {name: file.path.name for file in self._files for name in file.entries}
            with self._index.open("w") as out:
                json.dump({"metadata": {"total_size": total}, "weight_map": where}, out, indent=2)
                out.flush()
                os.fsync(out.fileno())


def _grouped(sources: Sequence[SavedTensor]) -> list[list[SavedTensor]]:
    groups: list[list[SavedTensor]] = [[]]
    room = _SHARD_BYTES
    for source in sources:
        size = prod(source.shape) * source.dtype.itemsize
        if groups[-1] and size > room:
            groups.append([])
            room = _SHARD_BYTES
        groups[-1].append(source)
        room -= size
    return groups


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [ALONE]
    return [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]


class _File:
    def __init__(self, path: FilePath, sources: Sequence[SavedTensor], ties: Mapping[str, str], shares: Shares) -> None:
        self.path = path
        self._sources = sorted(sources, key=lambda source: (-source.dtype.itemsize, source.name))
        self.entries: dict[str, Any] = {}
        blocks: dict[str, list[list[Any]]] = {}
        parts: dict[str, list[BlockPart]] = {}
        self.size, count = 0, 0
        for source in self._sources:
            length = prod(source.shape) * source.dtype.itemsize
            here = self.size, self.size + length
            self.entries[source.name] = {"dtype": _NAMES[source.dtype], "shape": source.shape, "data_offsets": here}
            self.size += length
            parts[source.name] = list(shares.parts(source)) if source.plain is None else []
            zeros = (0,) * len(source.shape)
            for offsets, shape in [(part.offsets, part.shape) for part in parts[source.name]] or [
                (zeros, source.shape)
            ]:
                blocks.setdefault(source.name, []).append([offsets, shape, count])
                count += -(-prod(shape) * source.dtype.itemsize // SUM_BYTES)
        kept = {source.name for source in sources}
        tied = {name: known for name, known in ties.items() if known in kept}
        self._metadata = {
            "format": "pt",
            **tied,
            _BLOCKS: json.dumps(blocks),
            _SUMS: "0" * SUM_DIGITS * count,
            _OWN: "0" * 8,
        }
        self._blocks = blocks
        self._start = len(self._header(self._metadata))
        self.pieces: list[tuple[SavedTensor, list[Piece]]] = []
        for source in self._sources:
            pieces = [
                Piece(part.rank, str(path), self._at(source, part.offsets), part.dim, part.start, part.length)
                for part in parts[source.name]
            ]
            if pieces:
                self.pieces.append((source, pieces))

    def _at(self, source: SavedTensor, offsets: Sequence[int]) -> int:
        """Where in the file the element with these indices stands."""
        strides = torch.empty(source.shape, device="meta").stride()
        before = sum(at * stride for at, stride in zip(offsets, strides, strict=True)) * source.dtype.itemsize
        begin: int = self.entries[source.name]["data_offsets"][0]
        return self._start + begin + before

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        text = json.dumps({"__metadata__": metadata, **self.entries}).encode()
        text += b" " * (-(len(text) + _LENGTH.size) % 64)
        return _LENGTH.pack(len(text)) + text

    def finish(self, sums: Mapping[tuple[str, int], list[str]]) -> None:
        with Target(str(self.path)) as target:
            digits: list[str] = []
            for source in self._sources:
                for offsets, shape, _ in self._blocks[source.name]:
                    at = self._at(source, offsets)
                    if source.plain is not None:
                        found = target.write(at, source.plain, lambda size: None)
                    else:
                        found = sums[str(self.path), at] if prod(shape) else []
                    digits += found
            told = {**self._metadata, _SUMS: "".join(digits)}
            own = zlib.crc32(self._header(told))
            target.write_bytes(0, self._header({**told, _OWN: f"{own:08x}"}))
            target.sync(self._start + self.size)


# -- reading -----------------------------------------------------------------------------------------------------------


def catalog(path: FilePath) -> Catalog:
    """The content of a file or folder of this format. Raises CheckpointError and OSError."""
    tensors: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    if path.is_file():
        files = [path]
    elif (path / INDEX).exists():
        try:
            found = json.loads((path / INDEX).read_text())["weight_map"]
            files = [path / name for name in dict.fromkeys(found.values())]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path / INDEX} is corrupt, or no index of safetensors: {error}") from None
    else:
        files = [path / ALONE]
    for file in files:
        try:
            _read(file, tensors, ties)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"{file} is corrupt, or no file of safetensors: its header is {error}") from None
    ties = {name: kept for name, kept in ties.items() if kept in tensors and name not in tensors}
    return Catalog(path, tensors, {}, {name: (name,) for name in tensors}, ties)


def _read(file: FilePath, tensors: dict[str, Entry], ties: dict[str, str]) -> None:
    with file.open("rb") as opened:
        whole = os.fstat(opened.fileno()).st_size
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        if length > whole:
            raise ValueError(f"{length} bytes, and the file has {whole}")
        raw = opened.read(length)
    header = json.loads(raw)
    metadata = header.pop("__metadata__", {})
    start = _LENGTH.size + length
    blocks: dict[str, Any] = {}
    if _OWN in metadata:
        own = f'"{_OWN}": "'.encode()
        zeroed = raw.replace(own + metadata[_OWN].encode(), own + b"0" * 8, 1)
        if f"{zlib.crc32(_LENGTH.pack(length) + zeroed):08x}" != metadata[_OWN]:
            raise CheckpointError(f"{file} is corrupt: its header does not have its own checksum")
        blocks = json.loads(metadata[_BLOCKS])
        first = _LENGTH.size + raw.index(f'"{_SUMS}": "'.encode()) + len(_SUMS) + 5
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if ends and start + max(ends) > whole:
        raise CheckpointError(
            f"{file} is truncated: it has {whole} bytes, and its tensors end at byte {start + max(ends)}"
        )
    for name, entry in header.items():
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        if dtype is None:
            raise CheckpointError(f"'{name}' of {file} is of dtype {entry['dtype']}, which PyTorch does not have")
        low, high = entry["data_offsets"]
        if high - low != prod(shape) * dtype.itemsize:
            raise ValueError(f"'{name}': {high - low} bytes for {entry['dtype']}{list(shape)}")
        strides = tuple(torch.empty(shape, device="meta").stride())
        stored = []
        for offsets, sizes, number in blocks.get(name, [[(0,) * len(shape), shape, -1]]):
            at = start + low + sum(i * stride for i, stride in zip(offsets, strides, strict=True)) * dtype.itemsize
            sums = None if number < 0 else (str(file), first + SUM_DIGITS * number)
            stored.append(Stored(str(file), at, dtype, tuple(offsets), tuple(sizes), strides, sums))
        tensors[name] = Entry(dtype, shape, tuple(stored))
    ties.update({name: kept for name, kept in metadata.items() if isinstance(kept, str)})


__all__ = ["TensorsWriter", "catalog", "is_file", "laid_in_rows", "strangers"]
