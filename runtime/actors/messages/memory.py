"""Memory that travels with a message: anonymous files (memfd), written once, mapped privately by each receiver.

A receiver copies nothing until it writes, and only it sees its writes. Its page tables point at the sender's pages, so
the sender must not write them again while any receiver has them. Each receiver therefore has a byte in the file's first
page, which it sets when it lets the memory go; once all have, the sender may use the file for another message. That
spares what costs most, several times the copying: new pages from the kernel. A receiver that is killed sets nothing,
and the file is then not used again.

What is used again is mapped by the sender, too, and stays so while it is kept: to copy through a mapping costs a
quarter of what `pwrite` does. Into new pages `pwrite` is the cheaper way, for those need not be cleared first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from monarch.runtime.shared.memory import new_file
from monarch.runtime.transport import buffers

SLOTS = mmap.PAGESIZE
"""How many receivers a file can have if it is to be used again, and where its data begins."""
KEEP_BYTES = 128 << 20
KEEP_FILES = 32
"""How much a process keeps for further messages."""
_ALIGNMENT = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _File:
    """A file that is kept: how large it is, and how many receivers it was sent to."""

    __slots__ = ("_address", "fd", "issued", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.issued = 0
        self._address: int | None = None

    def free(self) -> bool:
        return os.pread(self.fd, self.issued, 0) == b"\1" * self.issued

    def again(self) -> None:
        """Use it again: it is free."""
        os.pwrite(self.fd, bytes(self.issued), 0)
        self.issued = 0
        if self._address is None:
            self._address = _map(self.fd, self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def write(self, part: memoryview, at: int) -> None:
        """Without the interpreter's lock, either way."""
        if self._address is not None:
            ctypes.memmove(self._address + at, buffers.address_of(part), len(part))
            return
        while part:
            written = os.pwrite(self.fd, part, at)
            part, at = part[written:], at + written

    def close(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self.size)
            self._address = None
        os.close(self.fd)


class FilePool:
    """Files of this process that were sent, the oldest first: to be used again once their receivers are through."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.files: list[_File] = []
        self._bytes = 0

    def take(self, size: int) -> _File | None:
        """A free one that is large enough, and not much too large."""
        with self._lock:
            for file in self.files:
                if size <= file.size <= 4 * size and file.free():
                    self.files.remove(file)
                    self._bytes -= file.size
                    return file
        return None

    def give(self, file: _File) -> None:
        dropped = []
        with self._lock:
            self.files.append(file)
            self._bytes += file.size
            while self._bytes > KEEP_BYTES or len(self.files) > KEEP_FILES:
                dropped.append(self.files.pop(0))
                self._bytes -= dropped[-1].size
        for old in dropped:
            old.close()


kept_files = FilePool()
_inherited: list[FilePool] = []


def _after_fork() -> None:
    """In a forked child the files are the parent's."""
    global kept_files
    _inherited.append(kept_files)
    kept_files = FilePool()


os.register_at_fork(after_in_child=_after_fork)


class MessageMemory:
    """The file of a message. Once nothing refers to it, it is kept for another."""

    __slots__ = ("_file", "_pid")

    def __init__(self, file: _File) -> None:
        self._file = file
        self._pid = os.getpid()

    @staticmethod
    def of(parts: Sequence[Any]) -> MessageMemory:
        """A file that holds these, each from the next multiple of 64 bytes."""
        views = [memoryview(part).cast("B") for part in parts]
        memory, at = MessageMemory._sized(SLOTS + sum(map(_rounded, map(len, views)))), SLOTS
        for view in views:
            memory._file.write(view, at)
            at += _rounded(len(view))
        return memory

    @staticmethod
    def room(sizes: Sequence[int]) -> tuple[MessageMemory, list[memoryview]]:
        """A file for parts of these sizes, with anything in it, and the parts, to be written before it is sent."""
        size = SLOTS + sum(map(_rounded, sizes))
        memory = MessageMemory._sized(size)
        return memory, _split(memoryview(mmap.mmap(memory.fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)), sizes, SLOTS)

    @staticmethod
    def _sized(size: int) -> MessageMemory:
        file = kept_files.take(size)
        if file is None:
            return MessageMemory(_File(new_file("monarch-message", size), size))
        memory = MessageMemory(file)  # from here on it is closed, or kept, whatever is raised
        file.again()
        return memory

    @property
    def fd(self) -> int:
        return self._file.fd

    @property
    def fds(self) -> Sequence[int]:
        return (self._file.fd,)

    def issue(self) -> int:
        """For another receiver: which byte it is to set."""
        slot = self._file.issued
        self._file.issued += 1
        return slot

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        """The parts, to be read while this is referred to."""
        slot = self.issue()  # that of a receiver which is through as soon as nothing refers to this any more
        if slot < SLOTS:
            os.pwrite(self.fd, b"\1", slot)
        size = SLOTS + sum(map(_rounded, sizes))
        return _split(
            memoryview(mmap.mmap(self.fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)), sizes, SLOTS
        )

    def __del__(self) -> None:
        if self._pid != os.getpid():
            return
        if 0 < self._file.issued <= SLOTS:
            kept_files.give(self._file)
        else:
            with suppress(OSError):
                self._file.close()


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def mapped(fd: int, slot: int, sizes: Sequence[int]) -> list[memoryview]:
    """The parts of a file that came with a message, writable here alone, until nothing refers to any of them.

    Mapped by the C function, for Python's `mmap` keeps a file open for each mapping.
    """
    size = SLOTS + sum(map(_rounded, sizes))
    address = _map(fd, size, mmap.MAP_PRIVATE)
    try:
        slots = _map(fd, SLOTS, mmap.MAP_SHARED)
    except OSError:
        _libc.munmap(address, size)
        raise
    memory = _array(size).from_address(address)
    # Not at exit: a tensor in it may be in use until the very end.
    weakref.finalize(memory, _let_go, os.getpid(), address, size, slots, slot).atexit = False
    return _split(memoryview(memory).cast("B"), sizes, SLOTS)


class _Rooms:
    """Memory of this process' own that large messages from other hosts were read into, and that nobody uses now. New
    pages from the kernel would cost more than the reading."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer that gives one back may run within anything
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> mmap.mmap:
        with self._lock:
            for free in self._free:
                if size <= len(free) <= 4 * size:
                    self._free.remove(free)
                    return free
        return mmap.mmap(-1, size)

    def give(self, free: mmap.mmap) -> None:
        with self._lock:
            self._free.append(free)
            while sum(map(len, self._free)) > KEEP_BYTES or len(self._free) > KEEP_FILES:
                self._free.pop(0)


_rooms = _Rooms()


def room(sizes: Sequence[int]) -> list[memoryview]:
    """Memory for the parts of a message, with anything in it, until nothing refers to any of them."""
    size = sum(map(_rounded, sizes))
    own = _rooms.take(size)
    memory = _array(size).from_buffer(own)
    weakref.finalize(memory, _rooms.give, own).atexit = False
    return _split(memoryview(memory).cast("B"), sizes, 0)


def _split(whole: memoryview, sizes: Sequence[int], at: int) -> list[memoryview]:
    parts = []
    for part in sizes:
        parts.append(whole[at : at + part])
        at += _rounded(part)
    return parts


@lru_cache(64)
def _array(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    """A new type costs more than a mapping."""
    return ctypes.c_char * size


def _map(fd: int, size: int, flags: int) -> int:
    address: int | None = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {size} bytes of a message: {os.strerror(error)}")
    return address


def _let_go(pid: int, address: int, size: int, slots: int, slot: int) -> None:
    if pid != os.getpid():  # a forked child has a mapping of its own, and is no receiver
        return
    _libc.munmap(address, size)
    if slot < SLOTS:
        ctypes.c_ubyte.from_address(slots + slot).value = 1
    _libc.munmap(slots, SLOTS)
