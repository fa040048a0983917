"""Blocks of tensors, to files and from files, with checksums on the way."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import prod

import torch

from monarch.compiler.execution.storage import SUM_BYTES, SUM_DIGITS, Stored

SPAN_BYTES = 8 << 20
"""What is scattered over at most so many bytes of a file is read in one stretch, with what lies in between."""
_SLAB_BYTES = 8 << 20
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By size, dtypes that NumPy has too: elements are moved as these, whatever they are."""


_HUGEPAGE, _HUGE = 14, 2 << 20


def new_block(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose elements are still to be filled, all at once: large ones in huge pages, where the kernel has some,
    for filling spends more time in page faults than in copying otherwise."""
    made = torch.empty(tuple(shape), dtype=dtype)
    start = -(-made.data_ptr() // _HUGE) * _HUGE
    length = made.data_ptr() + made.nbytes - start
    if length >= _HUGE:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _HUGEPAGE)
    return made


class CorruptError(Exception):
    """Bytes of a file are not those that were written."""


def stretches(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's elements in row-major order, as bytes: from its own memory where they lie so, and otherwise copied, a
    few MiB at a time."""
    row = tensor.detach().resolve_conj().resolve_neg()
    if not row.numel():
        return
    if row.device.type == "cpu" and row.is_contiguous():
        yield memoryview(row.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        return
    if not row.ndim or row.numel() * row.itemsize <= _SLAB_BYTES:
        yield memoryview(row.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        return
    rows = max(1, _SLAB_BYTES * row.shape[0] // (row.numel() * row.itemsize))
    for start in range(0, row.shape[0], rows):
        slab = row[start : start + rows]
        yield from stretches(slab[0] if len(slab) == 1 and not slab.is_contiguous() else slab)


class Checksum:
    """Of the bytes that it is told, in order: GMAC with a key of zeros, which keeps nothing secret, and which
    processors compute five times as fast as zlib does a CRC-32."""

    def __init__(self) -> None:
        # Loaded here: workers start without it.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._gmac = Cipher(algorithms.AES(bytes(16)), modes.GCM(bytes(12))).encryptor()

    def add(self, data: memoryview) -> None:
        """Tell it more."""
        self._gmac.authenticate_additional_data(data)

    def text(self) -> str:
        """The checksum of all that it was told. Once."""
        self._gmac.finalize()
        return self._gmac.tag.hex()


def checksum(data: memoryview) -> str:
    """The checksum of these bytes."""
    made = Checksum()
    made.add(data)
    return made.text()


def write(fd: int, offset: int, tensor: torch.Tensor, wrote: Callable[[int], None]) -> list[str]:
    """Write a tensor's elements, row-major, from `offset` on; `wrote` is told the bytes as they go, and may raise to
    end it. Gives their checksums. Raises OSError."""
    sums: list[str] = []
    at, current = 0, Checksum()
    for stretch in stretches(tensor):
        while stretch:
            part, stretch = stretch[: SUM_BYTES - at % SUM_BYTES], stretch[SUM_BYTES - at % SUM_BYTES :]
            write_all(fd, part, offset + at)
            current.add(part)
            at += len(part)
            if at % SUM_BYTES == 0:
                sums.append(current.text())
                current = Checksum()
            wrote(len(part))
    return [*sums, current.text()] if at % SUM_BYTES else sums


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
        """Fill `target`, which is what the tensor `name` has from `start` on, and convert where its dtype is another.

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
        """Fill `view` with what the block has from `low` on, in stretches of the file that are dense or short."""
        size = block.dtype.itemsize
        reach = [(length - 1) * stride for length, stride in zip(view.shape, block.strides, strict=True)]
        first = sum(at * stride for at, stride in zip(low, block.strides, strict=True)) * size
        span = (sum(reach) + 1) * size
        dense = span == view.numel() * size and _row_major(view.shape, block.strides)
        if dense and view.is_contiguous() and view.dtype == block.dtype:
            self._bytes(memoryview(view.reshape(-1).view(torch.uint8).numpy()), block, first, name)  # type: ignore[arg-type]
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
    """What went wrong with a file, for a user."""
    why = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "no permission",
        errno.EROFS: "the file system is read-only",
        errno.ENOENT: "it is not there; workers on several hosts need one file system that all of them see",
    }.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
    return f"{error.filename or file}: {why}"
