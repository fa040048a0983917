"""The shared memory of one mesh: its layout, and tensors that view it.

    control    one cache line for the mesh and one for each worker (see `signals`)
    ring       commands (see `ring`)
    staging    tensors on their way from the controller to the workers
    results    an area a worker, which it alone writes: small results of steps (see `results`)
    windows    four areas a worker, which it alone writes and its peers read (see `collectives`), and slots for what
               the parts of a plan send each other (see `collectives.transfers`): two within a step, and more beside the
               steps that follow, so that a sender need not wait for its readers' answer to each piece

It is one anonymous file, mapped by all. Its size is an address range: pages are taken when first touched, and given
back when the last process that maps it ends. The windows do not grow with the tensors that go through them, which
travel in pieces that fit into a core's cache.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monarch.runtime.shared import futex, memory, signals

PAGE = 4096
RING_BYTES = 1 << 20
STAGING_BYTES = 64 << 20
RESULTS_BYTES = 64 << 10
AREAS = 4
SLOTS = 2
BACK_SLOTS = 8
ALIGN = 64
_ALL_WINDOWS = 64 << 20
_CACHED_VIEWS = 20_000


def aligned(size: int, to: int = ALIGN) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class Geometry:
    """Offsets, in bytes, into the shared memory of a mesh of `workers`."""

    workers: int
    area: int

    @staticmethod
    def of(workers: int) -> Geometry:
        """Areas of 1 MiB for up to 16 workers, and 64 MiB of windows in all for more of them; but always at least 1 KiB
        for each peer."""
        area = min(1 << 20, _ALL_WINDOWS // (AREAS * workers))
        return Geometry(workers, aligned(max(area, workers << 10), PAGE))

    @property
    def control(self) -> int:
        return aligned(signals.size_in_bytes(self.workers), PAGE)

    @property
    def ring(self) -> int:
        return self.control

    @property
    def staging(self) -> int:
        return self.ring + RING_BYTES

    @property
    def results(self) -> int:
        return self.staging + STAGING_BYTES

    @property
    def windows(self) -> int:
        return self.results + self.workers * RESULTS_BYTES

    @property
    def total(self) -> int:
        return self.windows + self.workers * (AREAS + SLOTS + BACK_SLOTS) * self.area

    def results_of(self, rank: int) -> int:
        return self.results + rank * RESULTS_BYTES

    def area_of(self, rank: int, number: int) -> int:
        return self.windows + (rank * (AREAS + SLOTS + BACK_SLOTS) + number) * self.area


class Window:
    """One process's mapping of a mesh's shared memory."""

    def __init__(self, geometry: Geometry, fd: int, file: int = -1) -> None:
        """Maps the file `fd`. `file` is one that stays open, of those that peers may also map."""
        self.geometry = geometry
        self.file = file
        self.memory = mmap.mmap(fd, geometry.total, mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))
        self.bytes = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.words = self.bytes[: geometry.control].cast("q")
        self._whole: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[tuple[object, ...], torch.Tensor] = {}

    @staticmethod
    def create(geometry: Geometry) -> int:
        """A new shared memory, all zeros; gives its file descriptor."""
        return memory.new_file("monarch-mesh", geometry.total)

    def signals(self) -> signals.Signals:
        return signals.Signals(self.words, self.address, self.geometry.workers)

    def mark_dead(self, rank: int) -> None:
        """Mark the worker `rank` as dead, and wake all threads that wait for anything in this mesh."""
        if not self.words[signals.DEAD]:
            self.words[signals.DEAD] = 1 + rank
        futex.fence()
        futex.wake(self.address + 8 * signals.HEAD)
        for worker in range(self.geometry.workers):
            line = signals.line_of(worker)
            futex.wake(self.address + 8 * (line + signals.PROGRESS))
            futex.wake(self.address + 8 * (line + signals.DONE))

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The contiguous tensor at `offset`. Views are cached: every step asks for the same ones."""
        key = (offset, dtype, *shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            whole = self._whole.get(dtype)
            if whole is None:
                whole = self._whole[dtype] = torch.frombuffer(self.memory, dtype=dtype)
            size = 1
            for length in shape:
                size *= length
            first = offset // dtype.itemsize
            view = self._views[key] = whole[first : first + size].view(tuple(shape))
        return view

    def give_back(self, offset: int, size: int) -> None:
        """Return pages to the system; they read as zeros afterwards."""
        self.memory.madvise(mmap.MADV_REMOVE, offset, size)
