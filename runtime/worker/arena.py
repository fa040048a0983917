"""The memory in which a worker's steps put what only they read: one piece, for all plans that the worker has loaded.

Steps run one after the other, and nothing in it outlives one, so plans share it: it is as large as the largest of them
needs. Its pages are taken when they are first written.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch

from monarch.compiler.plan import ArenaRange


class Arena:
    """`size` bytes; none at first. Each tensor in it has a storage of its own, of its own bytes only."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._memory = _mapped(size)

    def fit(self, size: int) -> bool:
        """Have room for so many bytes, or give all back if it is 0. Gives whether the memory is another one now, so
        that tensors in it have to be asked for again. Raises OSError where there is none, and leaves all as it was."""
        if self.size >= size > 0 or self.size == size:
            return False
        self._memory = _mapped(size)
        self.size = size
        return True

    def at(self, region: ArenaRange) -> torch.Tensor:
        """The tensor that lies there."""
        assert self._memory is not None
        count = math.prod(region.shape)
        return torch.frombuffer(self._memory, dtype=region.dtype, count=count, offset=region.offset).view(region.shape)


class SubArena:
    """The arena from a byte on: where that of a function of a plan lies."""

    def __init__(self, arena: Arena | SubArena, start: int) -> None:
        self._arena = arena
        self._start = start

    def at(self, region: ArenaRange) -> torch.Tensor:
        """The tensor that lies there."""
        return self._arena.at(region._replace(offset=self._start + region.offset))


def _mapped(size: int) -> mmap.mmap | None:
    if not size:
        return None
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
