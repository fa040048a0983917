"""Blocks of tensors, to files and from files, with checksums on the way."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod

import numpy as np
import torch

from monarch.compiler.execution.storage import SUM_BYTES, SUM_DIGITS, Stored
from monarch.runtime.shared.wire import in_bytes

SPAN_BYTES = 8 << 20
"""Pieces within so many bytes of a file are read in one stretch, with the bytes between them."""
_SLAB_BYTES = 8 << 20
_BUFFER_BYTES, _PAGE = 4 << 20, 4096
"""So much is written directly at a time, at offsets and from addresses that the second divides."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By size, dtypes that NumPy has too: elements are moved as these, whatever they are."""


class CorruptError(Exception):
    """Bytes of a file are not those that were written."""


def stretches(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's elements in row-major order, as bytes: from its own memory where they are in this order there, and
    otherwise copied, a few MiB at a time."""
    row = tensor.detach().resolve_conj().resolve_neg()
    if not row.numel():
        return
    if row.device.type == "cpu" and row.is_contiguous():
        yield memoryview(in_bytes(row).numpy())  # type: ignore[arg-type]
        return
    if not row.ndim or row.numel() * row.itemsize <= _SLAB_BYTES:
        yield memoryview(in_bytes(row.cpu().contiguous()).numpy())  # type: ignore[arg-type]
        return
    rows = max(1, _SLAB_BYTES * row.shape[0] // (row.numel() * row.itemsize))
    for start in range(0, row.shape[0], rows):
        slab = row[start : start + rows]
        yield from stretches(slab[0] if len(slab) == 1 and not slab.is_contiguous() else slab)


class Checksum:
    """The checksum of bytes in order: GMAC with a key of zeros, which keeps nothing secret, and which processors
    compute five times as fast as zlib does a CRC-32."""

    def __init__(self) -> None:
        # Loaded here: workers start without it.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._gmac = Cipher(algorithms.AES(bytes(16)), modes.GCM(bytes(12))).encryptor()

    def add(self, data: memoryview) -> None:
        """Tell it more."""
        self._gmac.authenticate_additional_data(data)

    def text(self) -> str:
        """The checksum of all bytes so far. Once."""
        self._gmac.finalize()
        return self._gmac.tag.hex()


def checksum(data: memoryview) -> str:
    """The checksum of these bytes."""
    made = Checksum()
    made.add(data)
    return made.text()


class Target:
    """A file that blocks are written to. Long stretches pass by the system's cache of files: `put` copies them into a
    buffer that is aligned as direct writes need it, and the rest of a page at either end goes through the cache, for
    another worker may write the other part of that page. Where the file system has no direct writes, all does. To be
    closed."""

    def __init__(self, path: str) -> None:
        """Open the file, which is made where there is none. Raises OSError."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            self._direct = -1
            if error.errno != errno.EINVAL:
                os.close(self._fd)
                raise
        self._buffer: np.ndarray | None = None
        self._begin = self._start = self._end = 0
        """Where in the file the buffer begins, and the first and the last byte that it holds."""

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in {self._fd, self._direct} - {-1}:
            os.close(fd)
        self._fd = self._direct = -1

    def write(self, offset: int, tensor: torch.Tensor, wrote: Callable[[int], None]) -> list[str]:
        """Write a tensor's elements, row-major, from `offset` on; `wrote` is called with the bytes as they go, and may
        raise to end it. Gives their checksums. Raises OSError."""
        sums: list[str] = []
        at, current = 0, Checksum()
        put = self._put if tensor.nbytes >= SUM_BYTES and self._direct >= 0 else partial(write_all, self._fd)
        for stretch in stretches(tensor):
            while stretch:
                part, stretch = stretch[: SUM_BYTES - at % SUM_BYTES], stretch[SUM_BYTES - at % SUM_BYTES :]
                put(part, offset + at)
                current.add(part)
                at += len(part)
                if at % SUM_BYTES == 0:
                    sums.append(current.text())
                    current = Checksum()
                wrote(len(part))
        self._flush()
        return [*sums, current.text()] if at % SUM_BYTES else sums

    def write_bytes(self, offset: int, data: bytes) -> None:
        """Write these bytes at `offset`. Raises OSError."""
        write_all(self._fd, data, offset)

    def sync(self, size: int | None = None) -> None:
        """Have the disk store all of the file, which ends at `size` then, if there is one. Raises OSError."""
        if size is not None:
            os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    def _put(self, data: memoryview, offset: int) -> None:
        """Read the bytes at `offset`, right behind those that were read before."""
        if self._buffer is None:
            self._buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)
        while data:
            if self._start == self._end:
                self._begin = offset - offset % _PAGE
                self._start = self._end = offset
            room = self._begin + _BUFFER_BYTES - offset
            part, data = data[:room], data[room:]
            self._buffer[offset - self._begin :][: len(part)] = np.frombuffer(part, np.uint8)
            self._end = offset = offset + len(part)
            if self._end == self._begin + _BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._start == self._end:
            return
        assert self._buffer is not None
        held, begin, start, end = memoryview(self._buffer), self._begin, self._start, self._end  # type: ignore[arg-type]
        low, high = start + -start % _PAGE, end - end % _PAGE
        if low >= high:
            low = high = end
        write_all(self._fd, held[start - begin : low - begin], start)
        try:
            write_all(self._direct, held[low - begin : high - begin], low)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            write_all(self._fd, held[low - begin : high - begin], low)  # it opens files for these, and takes none
        write_all(self._fd, held[high - begin : end - begin], high)
        self._start = self._end


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    data = memoryview(data)
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class Reader:
    """Reads parts of tensors from the files in which their blocks stand. To be closed."""

    def __init__(self) -> None:
        self._end = ExitStack()
        self._open: dict[str, int] = {}
        self._last: tuple[tuple[str, int], bytearray] | None = None
        """The stretch with a checksum that was read last for a part of it: the next part often begins in it."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def fill(self, target: torch.Tensor, start: Sequence[int], blocks: Iterable[Stored], name: str) -> None:
        """Fill `target`, the part of the tensor `name` from `start` on, and convert where its dtype is another.

        Raises OSError, CorruptError, and ValueError where the blocks leave gaps."""
        missing = target.numel()
        for block in blocks:
            low = [max(0, mine - its) for mine, its in zip(start, block.start, strict=True)]
            high = [
                min(its_length, mine + length - its)
                for mine, length, its, its_length in zip(start, target.shape, block.start, block.shape, strict=True)
            ]
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            at = [its + first - mine for its, first, mine in zip(block.start, low, start, strict=True)]
            lengths = [last - first for first, last in zip(low, high, strict=True)]
            view = target[tuple(slice(first, first + length) for first, length in zip(at, lengths, strict=True))]
            missing -= view.numel()
            self._box(view, block, low, name)
        if missing:
            raise ValueError(f"'{name}': {missing} of {target.numel()} elements stand in no file")

    def _box(self, view: torch.Tensor, block: Stored, low: Sequence[int], name: str) -> None:
        """Fill `view` with the block's elements from `low` on, in stretches of the file that are dense or short."""
        size = block.dtype.itemsize
        reach = [(length - 1) * stride for length, stride in zip(view.shape, block.strides, strict=True)]
        first = sum(at * stride for at, stride in zip(low, block.strides, strict=True)) * size
        span = (sum(reach) + 1) * size
        dense = span == view.numel() * size and _row_major(view.shape, block.strides)
        if dense and view.is_contiguous() and view.dtype == block.dtype:
            self._bytes(memoryview(in_bytes(view).numpy()), block, first, name)  # type: ignore[arg-type]
        elif span <= SPAN_BYTES or not any(reach):
            buffer = bytearray(span)
            self._bytes(memoryview(buffer), block, first, name)
            row = torch.frombuffer(buffer, dtype=_WHOLE[size]).as_strided(tuple(view.shape), block.strides, 0)
            if view.dtype == block.dtype:  # elements as they are: in NumPy, which starts no threads for it
                view.view(_WHOLE[size]).numpy()[...] = row.numpy()
            else:
                view.copy_(row.view(block.dtype))
        else:
            dim = max(range(view.ndim), key=reach.__getitem__)
            half = view.shape[dim] // 2
            self._box(view.narrow(dim, 0, half), block, low, name)
            rest = [at + half * (here == dim) for here, at in enumerate(low)]
            self._box(view.narrow(dim, half, view.shape[dim] - half), block, rest, name)

    def _bytes(self, target: memoryview, block: Stored, first: int, name: str) -> None:
        """Fill `target` with the block's bytes from `first` on, checked where there are checksums."""
        if block.sums is None:
            self._read(block.file, target, block.offset + first)
            return
        size = prod(block.shape) * block.dtype.itemsize
        last = first + len(target)
        begin = first // SUM_BYTES
        sums = bytearray(SUM_DIGITS * (-(-last // SUM_BYTES) - begin))
        self._read(block.sums[0], memoryview(sums), block.sums[1] + SUM_DIGITS * begin)
        for number in range(begin, -(-last // SUM_BYTES)):
            start, stop = number * SUM_BYTES, min((number + 1) * SUM_BYTES, size)
            low, high = max(start, first), min(stop, last)
            key = (block.file, block.offset + start)
            if self._last is not None and self._last[0] == key:
                target[low - first : high - first] = self._last[1][low - start : high - start]
                continue
            whole = (low, high) == (start, stop)
            part = target[low - first : high - first] if whole else memoryview(bytearray(stop - start))
            self._read(block.file, part, block.offset + start)
            if checksum(part).encode() != sums[SUM_DIGITS * (number - begin) :][:SUM_DIGITS]:
                raise CorruptError(
                    f"{block.file} is corrupt: in '{name}', bytes {block.offset + start} to {block.offset + stop} are "
                    "not what was written"
                )
            if not whole:
                self._last = key, part.obj  # type: ignore[assignment]
                target[low - first : high - first] = part[low - start : high - start]

    def _read(self, file: str, target: memoryview, offset: int) -> None:
        fd = self._open.get(file)
        if fd is None:
            fd = self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._end.callback(os.close, fd)
        while target:
            read = os.preadv(fd, [target], offset)
            if not read:
                raise CorruptError(f"{file} is truncated: it ends at byte {offset}, and {len(target)} more are needed")
            target, offset = target[read:], offset + read


def _row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def explain(error: OSError, file: str) -> str:
    """An error of a file, in words for a user."""
    why = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "no permission",
        errno.EROFS: "the file system is read-only",
        errno.ENAMETOOLONG: "the name is too long; a save needs eight letters more than the path has",
        errno.ENOENT: "it is not there; workers on several hosts need one file system that all of them see",
    }.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
    return f"{error.filename or file}: {why}"
