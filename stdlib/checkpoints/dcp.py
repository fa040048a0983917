"""The format of `torch.distributed.checkpoint`: a folder with `.metadata`, and files of containers, one for each block.

Ours have a file `.checksums` besides, which PyTorch passes over: a line with the CRC-32 of what follows, a line of JSON
(where in the files elements begin, and each block's first checksum), and the checksums of all blocks as hexadecimal
digits."""

from __future__ import annotations

import collections
import io
import json
import os
import pathlib
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from monarch.compiler.errors import CheckpointError
from monarch.compiler.execution.storage import SUM_DIGITS, Piece, Stored
from monarch.runtime.shared.files import Target
from monarch.stdlib.checkpoints.blocks import SavedTensor, Shares
from monarch.stdlib.checkpoints.catalog import Catalog, Entry
from monarch.stdlib.checkpoints.containers import Container, find
from monarch.stdlib.checkpoints.nest import Path

METADATA, SUMS = ".metadata", ".checksums"
_HERE = "__here_0.distcp"
"""This process's own part: Python values, and tensors that are on no mesh."""


def strangers(path: FilePath) -> list[str]:
    """Files there that are no part of a checkpoint of this format."""
    if not path.is_dir():
        return [path.name]
    names = sorted(os.listdir(path))
    return [
        name for name in names if METADATA not in names or not (name in (METADATA, SUMS) or name.endswith(".distcp"))
    ]


class DcpWriter:
    """Writes one checkpoint into a folder: `pieces` are what workers are to write, and `finish` does the rest."""

    def __init__(
        self,
        folder: FilePath,
        sources: Sequence[SavedTensor],
        ties: Mapping[str, str],
        values: Mapping[str, bytes],
        paths: Mapping[str, Path],
    ) -> None:
        self._folder, self._ties, self._values, self._paths = folder, ties, values, paths
        self._sources = sources
        self._blocks: dict[str, list[tuple[str, Container, tuple[int, ...]]]] = {}
        """By tensor its blocks: file, container, and where in the tensor it begins."""
        self.pieces: list[tuple[SavedTensor, list[Piece]]] = []
        ends: collections.Counter[str] = collections.Counter()
        shares, meshes = Shares(), list[Any]()
        for source in sources:
            if source.plain is not None:
                continue
            if not any(source.mesh is mesh for mesh in meshes):
                meshes.append(source.mesh)
            number = next(at for at, mesh in enumerate(meshes) if mesh is source.mesh)
            pieces = []
            for part in shares.parts(source):
                file = f"__{part.rank}_{number}.distcp"
                container = Container(source.dtype, part.shape, ends[file])
                ends[file] = container.end
                self._blocks.setdefault(source.name, []).append((file, container, part.offsets))
                where = str(folder / file)
                pieces.append(Piece(part.rank, where, container.elements, part.dim, part.start, part.length))
            self.pieces.append((source, pieces))

    def finish(self, sums: Mapping[tuple[str, int], list[str]]) -> None:
        """Write what workers do not, once they have written; `sums` are theirs. Raises OSError."""
        sums = dict(sums)
        storage: dict[Any, Any] = {}
        known: dict[str, Any] = {}
        with Target(str(self._folder / _HERE)) as here:
            at = 0
            for name, data in self._values.items():
                here.write_bytes(at, data)
                storage[metadata.MetadataIndex(name)] = filesystem._StorageInfo(_HERE, at, len(data))
                known[name] = metadata.BytesStorageMetadata()
                at += len(data)
            for source in self._sources:
                if source.plain is not None:
                    container = Container(source.dtype, source.shape, at)
                    self._blocks[source.name] = [(_HERE, container, (0,) * len(source.shape))]
                    key = str(self._folder / _HERE), container.elements
                    sums[key] = here.write(container.elements, source.plain, lambda size: None)
                    at = container.end
            here.sync()
        listed, digits = self._wrap(sums)
        for source in self._sources:
            for name in (source.name, *(tied for tied, kept in self._ties.items() if kept == source.name)):
                chunks = []
                for number, (file, container, offsets) in enumerate(self._blocks.get(source.name, ())):
                    chunks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(container.shape)))
                    index = metadata.MetadataIndex(name, offsets, number)
                    storage[index] = filesystem._StorageInfo(file, container.at, container.end - container.at)
                properties = metadata.TensorProperties(dtype=source.dtype)
                known[name] = metadata.TensorStorageMetadata(properties, torch.Size(source.shape), chunks)
        made = metadata.Metadata(known, self._paths, storage, metadata.StorageMeta())
        made.version = filesystem.CURRENT_DCP_VERSION
        pickled = pickle.dumps(made)
        values = {name: zlib.crc32(data) for name, data in self._values.items()}
        index_ = json.dumps({"metadata": zlib.crc32(pickled), "values": values, "blocks": listed})
        text = f"{index_}\n{digits}".encode()
        _put(self._folder / SUMS, f"{zlib.crc32(text):08x}\n".encode() + text)
        _put(self._folder / METADATA, pickled)

    def _wrap(self, sums: Mapping[tuple[str, int], list[str]]) -> tuple[dict[str, Any], str]:
        """Write the bytes around the elements. Gives for each file its blocks (where the container begins, where its
        elements do, the first checksum), and the checksums."""
        files: dict[str, list[Container]] = {}
        for blocks in self._blocks.values():
            for file, container, _ in blocks:
                files.setdefault(file, []).append(container)
        listed: dict[str, Any] = {}
        digits: list[str] = []
        count = 0
        for file, containers in files.items():
            with Target(str(self._folder / file)) as target:
                for container in containers:
                    found = sums[str(self._folder / file), container.elements] if container.size else []
                    target.write_bytes(container.at, container.head)
                    target.write_bytes(container.elements + container.size, container.tail)
                    listed.setdefault(file, []).append([container.at, container.elements, count])
                    digits += found
                    count += len(found)
                target.sync()
        return listed, "".join(digits)


def _put(path: FilePath, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# -- reading -----------------------------------------------------------------------------------------------------------

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class _Metadata(pickle.Unpickler):
    """Loads the classes of which DCP's metadata consists, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def catalog(path: FilePath) -> Catalog:
    """The content of a checkpoint of this format. Raises CheckpointError and OSError."""
    pickled = (path / METADATA).read_bytes()
    sums = _Sums(path)
    sums.check(METADATA, pickled)
    try:
        made = _Metadata(io.BytesIO(pickled)).load()
        if not isinstance(made, metadata.Metadata):
            raise pickle.UnpicklingError(f"it is a {type(made).__name__}")
        return _catalog(path, made, sums)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # an unpickler raises whatever the bytes make it raise
        raise CheckpointError(
            f"{path / METADATA} is corrupt, or no metadata of torch.distributed.checkpoint: {error}",
            hint="load another checkpoint.",
        ) from None


class _Sums:
    """The content of `.checksums`; nothing where there is no such file."""

    def __init__(self, path: FilePath) -> None:
        self._path = path
        self._index: dict[str, Any] | None = None
        self.blocks: dict[tuple[str, int], tuple[int, int]] = {}
        """By file and container, where its elements begin, and where its first checksum stands."""
        try:
            data = (path / SUMS).read_bytes()
        except FileNotFoundError:
            return
        told, _, text = data.partition(b"\n")
        if told != f"{zlib.crc32(text):08x}".encode():
            raise CheckpointError(f"{path / SUMS} is corrupt: it does not have its own checksum")
        line, _, _ = text.partition(b"\n")
        self._index = json.loads(line)
        first = len(told) + 1 + len(line) + 1
        for file, blocks in self._index["blocks"].items():
            for at, elements, number in blocks:
                self.blocks[file, at] = elements, first + SUM_DIGITS * number

    def check(self, name: str, data: bytes) -> None:
        """Raise CheckpointError unless these are the bytes of `.metadata`, or of a value of this name."""
        if self._index is None:
            return
        expected = self._index["metadata"] if name == METADATA else self._index["values"].get(name)
        if expected != zlib.crc32(data):
            what = self._path / METADATA if name == METADATA else f"{self._path / _HERE}: the value '{name}'"
            raise CheckpointError(f"{what} is corrupt: its {len(data)} bytes differ from those written")


def _catalog(path: FilePath, made: Any, sums: _Sums) -> Catalog:
    tensors: dict[str, Entry] = {}
    values: dict[str, Callable[[], bytes]] = {}
    for name, known in made.state_dict_metadata.items():
        if isinstance(known, metadata.TensorStorageMetadata):
            dtype, shape = known.properties.dtype, tuple(known.size)
            blocks = tuple(
                _stored(path, name, dtype, chunk, made.storage_data[metadata.MetadataIndex(name, chunk.offsets)], sums)
                for chunk in known.chunks
            )
            tensors[name] = Entry(dtype, shape, blocks)
        else:
            values[name] = partial(_value, path, name, made.storage_data[metadata.MetadataIndex(name)], sums)
    paths = made.planner_data if isinstance(made.planner_data, dict) else {}
    return Catalog(path, tensors, values, {name: tuple(paths.get(name, (name,))) for name in (*tensors, *values)})


def _value(path: FilePath, name: str, info: Any, sums: _Sums) -> bytes:
    try:
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
    except OSError as error:
        raise CheckpointError(f"cannot read '{name}' of {path}: {error}") from None
    sums.check(name, data)
    return data


def _stored(path: FilePath, name: str, dtype: torch.dtype, chunk: Any, info: Any, sums: _Sums) -> Stored:
    shape, offsets = tuple(chunk.sizes), tuple(chunk.offsets)
    where = path / info.relative_path
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"'{name}' of {path} is compressed by an extension: {info.transform_descriptors}")
    known = sums.blocks.get((info.relative_path, info.offset))
    if known is not None:
        strides = tuple(torch.empty(shape, device="meta").stride())
        return Stored(str(where), known[0], dtype, offsets, shape, strides, (str(path / SUMS), known[1]))
    try:
        with where.open("rb") as file:
            found = find(file, info.offset, info.length)
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"cannot read '{name}': {where} at {info.offset} holds no tensor ({error})",
            hint="the file is truncated or corrupt.",
        ) from None
    if found is None or found.shape != shape:
        raise CheckpointError(
            f"cannot read '{name}': {where} at {info.offset} holds no plain tensor of sizes {list(shape)}",
            hint="torch.distributed.checkpoint.format_utils.dcp_to_torch_save writes it to one file for torch.load.",
        )
    return Stored(str(where), found.offset, found.dtype, offsets, shape, found.strides)


__all__ = ["DcpWriter", "catalog", "strangers"]
